"""The README's table of what `make prove` measured, composed from benchmarks/*.json: `make proof` writes it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- made by `make proof` from benchmarks/ -->", "<!-- end -->"

AREAS = {
    "parity": "layouts of Llama, GPT-2 and Qwen2, 8 steps",
    "resume": "resume after losing the last checkpoint",
    "resume-matrix": "resume on another layout, five steps",
    "zoo-zero": "every causal-LM type, data 2, ZeRO-2",
    "zoo-pipeline": "every causal-LM type, pipeline 2",
    "zoo-tensor": "every causal-LM type, tensor 2, layers cut",
    "zoo-tensor-fallback": "every causal-LM type, tensor 2, outputs gathered",
    "zoo-pipeline-tensor": "every causal-LM type, pipeline 2 x tensor 2",
}
_KEYS = {
    "parity": ("loss_absolute", "norm_relative", "weight_absolute"),
    "zoo": ("loss", "norm", "weights"),
}


def table() -> str:
    """A markdown table; areas that were not measured are left out."""
    rows = [
        "| `make prove`, two CPU cores | measured | cases | worst loss difference | worst norm | worst weight |",
        "|---|---|---|---|---|---|",
    ]
    for area, what in AREAS.items():
        path = ROOT / "benchmarks" / f"{area}.json"
        if path.exists():
            document = json.loads(path.read_text(encoding="utf-8"))
            cells = _resume(document) if area.startswith("resume") else _measured(area, document["cases"])
            rows.append(f"| [{what}](benchmarks/{area}.json) | {document['date']} | {' | '.join(cells)} |")
    return "\n".join(rows)


def _resume(document: dict[str, Any]) -> list[str]:
    cases = document["cases"].values()
    if "loss_absolute" in next(iter(cases)):
        return [f"{len(cases)} pairs of layouts", f"{max(c['loss_absolute'] for c in cases):.1e}", "", ""]
    return [f"{sum(c['bit_for_bit'] for c in cases)} of {len(cases)} bit for bit", "", "", ""]


def _measured(area: str, cases: dict[str, dict[str, Any]]) -> list[str]:
    keys = _KEYS[area.partition("-")[0]]
    if area == "parity":
        proved = [c for c in cases.values() if c["precision"] == "fp32"]
        count = f"{len(proved)} in fp32; {len(cases) - len(proved)} in bf16 within 2 %"
    else:
        verdicts = [c["verdict"] for c in cases.values()]
        proved = [c for c in cases.values() if c["verdict"] == "proved"]
        others = [f"{verdicts.count(v)} {v}" for v in ("refused", "wrong", "error") if v in verdicts]
        count = ", ".join([f"{len(proved)} of {len(cases)} proved", *others])
    return [count, *(f"{max(c[key] for c in proved):.1e}" for key in keys)]


def written(readme: str) -> str:
    before, _, rest = readme.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    path = ROOT / "README.md"
    path.write_text(written(path.read_text(encoding="utf-8")), encoding="utf-8")
