"""Stands before an installed genesis on the path: importing it fails as it does where there is none."""

raise ModuleNotFoundError("the tests of genesis_callbacks run without genesis", name="genesis")
