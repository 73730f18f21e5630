"""Writes the table of docs/proof.md, what `make prove` measured, from benchmarks/*.json.

In the table and in the text, it marks the links to files that are older than their code.
"""

from __future__ import annotations

import json
import re
from typing import Any

from tests.figures import worst_of_cases
from tools.prove.proof_ledger import BENCHMARKS, ROOT, state
from tools.prove.proof_pieces import BENCHES, PIECES

PAGE = ROOT / "docs" / "proof.md"
BEGIN, END = "<!-- made by `make generated` from benchmarks/ -->", "<!-- end -->"
OLDER = "†"
"""Marks a link to figures that were measured on other code than this."""
NOTE = (
    f"{OLDER} The measured code has changed since this measurement. `make prove-list` lists the "
    "pieces to run again."
)
LINK = re.compile(rf"(\]\(\.\./benchmarks/([a-z-]+)\.json\))(\s+{OLDER})?")

AREAS = {
    "parity": "layouts of Llama, GPT-2 and Qwen2, 8 steps",
    "parity-wide": "expert ranks and context ranks, 8 steps",
    "optimizers": "Muon, Lion, Adafactor and 8-bit AdamW",
    "preference": "preference objectives and reward models",
    "distillation": "distillation from a teacher's scores",
    "islands": "several islands, compared with one process",
    "random-runs": "random recipes, compared with a plain loop, four steps and a resume",
    "resume": "resume after losing the last checkpoint",
    "resume-matrix": "resume on another layout, five steps",
    "recovery": "30 random faults in one run, compared with an uninterrupted one",
    "recovery-hosts": "a lost host, planned again for those that are left",
    "zoo-zero": "every causal-LM type, data 2, ZeRO-2",
    "zoo-pipeline": "every causal-LM type, pipeline 2",
    "zoo-tensor": "every causal-LM type, tensor 2, layers sharded",
    "zoo-tensor-fallback": "every causal-LM type, tensor 2, outputs gathered",
    "zoo-pipeline-tensor": "every causal-LM type, pipeline 2 x tensor 2",
    "zoo-expert": "every mixture of experts, expert 2 over data 2",
    "zoo-pipeline-expert": "every mixture of experts, pipeline 2 x expert 2",
    "zoo-context": "every causal-LM type, context 2",
    "zoo-pipeline-context": "every causal-LM type, pipeline 2 x context 2",
    "zoo-vlm": "every vision-language type, split into layers",
    "zoo-vlm-pipeline": "every vision-language type, pipeline 2",
    "zoo-vlm-zero": "every vision-language type, data 2, ZeRO-3",
}
_KEYS = {
    "parity": ("loss_absolute", "norm_relative", "weight_absolute"),
    "zoo": ("loss", "norm", "weights"),
    "islands": ("loss", "norm", "weight"),
    "optimizers": ("loss", "norm", "weight"),
    "preference": ("loss", "norm", "weight"),
    "distillation": ("loss", "norm", "weight"),
    "recovery": ("loss_difference", "", ""),
}

WORDS = {
    "older": "older than the code that it speaks of",
    "unstamped": "has no digest: written before files had one",
}


VERDICTS = {
    "refused": "rejected",
    "not proved": "not verified",
    "wrong": "wrong",
    "error": "error",
}
"""Verdict in benchmarks/*.json -> the page's word for it."""


def table() -> str:
    """A markdown table; areas that were not measured are left out."""
    rows = [
        (
            "| `make prove`, two CPU cores | date | cases | largest loss difference | of gradient "
            "norms, relative | of weights |"
        ),
        "|---|---|---|---|---|---|",
    ]
    for area, what in AREAS.items():
        path = BENCHMARKS / f"{area}.json"
        if path.exists():
            document = json.loads(path.read_text(encoding="utf-8"))
            if area.startswith("resume"):
                cells = _resume(document)
            else:
                cells = (
                    _random(document)
                    if area == "random-runs"
                    else _measured(area, document["cases"])
                )
            rows.append(
                f"| [{what}](../benchmarks/{area}.json) | {document['date']} | "
                f"{' | '.join(cells)} |"
            )
    return "\n".join(rows)


def _resume(document: dict[str, Any]) -> list[str]:
    cases = document["cases"].values()
    if "loss_absolute" in next(iter(cases)):
        return [
            f"{len(cases)} pairs of layouts",
            f"{worst_of_cases(cases, 'loss_absolute'):.1e}",
            "",
            "",
        ]
    return [f"{sum(c['bit_for_bit'] for c in cases)} of {len(cases)} bit for bit", "", "", ""]


def _random(document: dict[str, Any]) -> list[str]:
    """Figures are of runs in fp32. Of training with dropout on several ranks validations alone are
    compared."""
    runs = [case for case in document["cases"].values() if "outcome" in case]
    outcomes = [case["outcome"] for case in runs]
    exact = [case for case in runs if case["outcome"] == "equal" and " bf16 " not in case["words"]]
    count = f"{outcomes.count('equal')} of {len(runs)} equal, {outcomes.count('refused')} rejected"
    return [
        count,
        *(
            f"{worst_of_cases([c for c in exact if key in c], key):.1e}"
            for key in ("loss", "norm", "weights")
        ),
    ]


def _measured(area: str, cases: dict[str, dict[str, Any]]) -> list[str]:
    keys = _KEYS[area.partition("-")[0]]
    if "verdict" not in next(iter(cases.values())):
        proved = [c for c in cases.values() if c.get("precision", "fp32") == "fp32"]
        count = f"{len(proved)} in fp32"
        if len(proved) < len(cases):
            count += f"; {len(cases) - len(proved)} in bf16 within 2 %"
    else:
        verdicts = [c["verdict"] for c in cases.values()]
        proved = [c for c in cases.values() if c["verdict"] == "proved"]
        others = [
            f"{verdicts.count(verdict)} {word}"
            for verdict, word in VERDICTS.items()
            if verdict in verdicts
        ]
        count = ", ".join([f"{len(proved)} of {len(cases)} verified", *others])
    return [
        count,
        *(f"{worst_of_cases(proved, key):.1e}" if key in proved[0] else "" for key in keys),
    ]


def marked(page: str) -> frozenset[str]:
    """The areas that the page marks as older than the code."""
    return frozenset(area for _, area, mark in LINK.findall(page) if mark)


def written(page: str, older: frozenset[str]) -> str:
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    linked = {area for _, area, _ in LINK.findall(f"{before}{table()}{after}")}
    note = f"\n\n{NOTE}" if older & linked else ""
    page = f"{before}{BEGIN}\n{table()}{note}\n{END}{after}"

    def mark(link: re.Match[str]) -> str:
        return link[1] + ((link[3] or f" {OLDER}") if link[2] in older else "")

    return LINK.sub(mark, page)


def states() -> dict[str, str]:
    """Each benchmarks/AREA.json that is there -> current | older | unstamped."""
    areas = [*(area for piece in PIECES.values() for area in piece.areas), *BENCHES]
    return {area: state(area) for area in areas if (BENCHMARKS / f"{area}.json").exists()}


def main() -> None:
    found = states()
    older = frozenset(area for area, age in found.items() if age != "current")
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), older), encoding="utf-8")
    for area in sorted(older):
        print(f"benchmarks/{area}.json: {WORDS[found[area]]}")
    print(f"{len(found) - len(older)} of {len(found)} files speak of the code as it is")


if __name__ == "__main__":
    main()
