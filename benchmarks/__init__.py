"""Measurements of Genesis beside other projects, earlier versions and the machine's limits; not part of the wheel."""
