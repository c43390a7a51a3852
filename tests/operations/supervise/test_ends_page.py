"""The page about ends of a run is the table of classes."""

import os

from genesis.operations.supervise.ends import CONSEQUENCES, ENDS, Signature
from tests.commands import REPOSITORY

PAGE = REPOSITORY / "docs/reference/ends.md"
BEGIN, END = "<!-- table of ends -->\n", "<!-- end of the table -->\n"


def render() -> str:
    lines = [
        "| class | what happened | what the supervisor does | what you can do | exit status |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| `{name}` | {rule.meaning} | {rule.policy} | {rule.remedy} | {rule.exit_status} |"
        for name, rule in ENDS.items()
    ]
    lines += ["", "## Signatures", ""]
    for name, rule in ENDS.items():
        known = [f"exit status {', '.join(map(str, rule.statuses))}"] if rule.statuses else []
        known += [rule.evidence] if rule.evidence else []
        lines += [f"**`{name}`**" + (f": {'; or '.join(known)}" if known else ""), ""]
        lines += render_signatures(rule.signatures)
    lines += [
        "**Consequences**, which are never a first cause: exit status 70, and",
        "",
        *render_signatures(CONSEQUENCES),
    ]
    return "\n".join(lines)


def render_signatures(signatures: tuple[Signature, ...]) -> list[str]:
    return [part for each in signatures for part in ("```text", each.example, "```", f"({each.source})", "")]


def test_the_golden_page_has_every_class_with_its_signatures_and_their_sources() -> None:
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    found, _, after = rest.partition(END)
    if os.environ.get("GENESIS_UPDATE_GOLDEN"):
        PAGE.write_text(f"{before}{BEGIN}{render()}{END}{after}", encoding="utf-8")
    else:
        assert found == render()
