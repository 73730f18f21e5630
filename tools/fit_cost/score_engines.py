"""Scores `shardwright estimate --json` by regime on runs of many engines: step time, memory, the printed band, regret.

Run from the checkout: python3 tools/fit_cost/score_engines.py [ROWS.json]   (engines.json by default)."""
import importlib.util, json, subprocess, sys, tempfile
from pathlib import Path
from statistics import mean, median

HERE = Path(__file__).resolve().parent
_spec = importlib.util.spec_from_file_location("score", HERE / "score.py"); S = importlib.util.module_from_spec(_spec); _spec.loader.exec_module(S)
GPUS = {**S.GPUS, "A800-SXM4-80GB": "a100-sxm4-80gb", "B200": "b200-sxm-180gb", "H200": "h200-sxm-141gb"}


def seconds(r):
    m, p, q, n = r["model"], r["parallel"], r["measured"], r["hardware"]["n_gpus"]
    if q["iteration_time_s"]:
        return q["iteration_time_s"]
    if q["tokens_per_s_per_gpu"]:
        return p["global_batch"] * m["seq_len"] / (q["tokens_per_s_per_gpu"] * n)
    h, L, s, v = m["hidden"], m["layers"], m["seq_len"], m["vocab"]  # TFLOP/s with recomputation (Narayanan et al.)
    return 96 * p["global_batch"] * s * L * h * h * (1 + s / (6 * h) + v / (16 * L * h)) / (n * q["tflops_per_gpu"] * 1e12)


def recipe(r):
    m, h, p, how = r["model"], r["hardware"], r["parallel"], r["price"]
    if r["family"] == "mixtral-moe":
        cfg = dict(model_type="mixtral", hidden_size=m["hidden"], num_hidden_layers=m["layers"], num_attention_heads=m["heads"], num_key_value_heads=m["kv_heads"],
                   intermediate_size=m["ffn_hidden"], vocab_size=m["vocab"], num_local_experts=8, num_experts_per_tok=2, max_position_embeddings=4096, tie_word_embeddings=False)
    elif m["gated_mlp"]:
        cfg = dict(model_type="llama", hidden_size=m["hidden"], num_hidden_layers=m["layers"], num_attention_heads=m["heads"], num_key_value_heads=m["kv_heads"],
                   intermediate_size=m["ffn_hidden"], vocab_size=m["vocab"], max_position_embeddings=m["seq_len"], tie_word_embeddings=bool(m["tied"]))
    else:
        cfg = dict(model_type="gpt2", n_embd=m["hidden"], n_layer=m["layers"], n_head=m["heads"], n_inner=m["ffn_hidden"], vocab_size=m["vocab"], n_positions=m["seq_len"],
                   tie_word_embeddings=m["tied"] is not False)
    cluster = dict(nodes=h["nodes"], gpus_per_node=h["gpus_per_node"], gpu=GPUS[h["gpu"]], intra_node_gbytes_per_second=h["intra_GBps"], inter_node_gbits_per_second=h["inter_Gbps_per_gpu"])
    if how["host_memory_gib"]:
        cluster["host_memory_gib"] = how["host_memory_gib"]
    model = dict(config=cfg, weights="random", attention=how["attention"] or "sdpa", **({"loss": how["loss"]} if how["loss"] else {}))
    out = dict(version=1, name=r["id"].lower().replace("_", "-").replace(".", "-"), target=how["target"] or "deepspeed", model=model, cluster=cluster,
               training=dict(sequence_length=m["seq_len"], global_batch_size=p["global_batch"], steps=1000, precision="bf16" if r["precision"] == "bf16" else "fp16"),
               assume=dict(kernels=how["kernels"] or "auto", ignore_memory=True),
               parallelism=dict(tensor=p["tp"], pipeline=p["pp"], data=p["dp"], zero_stage=p["zero_stage"], micro_batch_size=p["micro_batch"],
                                activation_checkpointing=p["activation_recompute"], schedule="1f1b", offload=p["offload"] or "none",
                                sequence_parallel=bool(p["sequence_parallel"]) and how["target"] == "megatron"))
    if how["lora"]:
        out["lora"] = dict(rank=16); out["parallelism"]["zero_stage"] = 0
    return out


def estimates(rs, chunk=50):
    out = []
    for i in range(0, len(rs), chunk):
        with tempfile.TemporaryDirectory() as d:
            paths = []
            for k, r in enumerate(rs[i:i + chunk]):
                f = Path(d) / f"{k:04d}.yaml"; f.write_text(json.dumps(recipe(r))); paths.append(str(f))
            run = subprocess.run([S.tool(), "estimate", "--json", *paths], capture_output=True, text=True)
            lines = [json.loads(x) for x in run.stdout.splitlines() if x.startswith("{")]
            if len(lines) != len(paths):
                print(run.stderr[-600:]); print(f"{len(lines)} answers for {len(paths)} recipes"); sys.exit(1)
            out += lines
    return out


def regime(r):
    """The engine, and what bounds the row: the printed band has to hold in each of them."""
    p, n = r["parallel"], r["hardware"]["nodes"]
    if r["engine"].startswith("DeepSpeed"):
        kind = "offload" if p["offload"] else "long" if r["model"]["seq_len"] > 16384 else "moe" if "moe" in r["family"] else f"zero{p['zero_stage']}"
        return f"DeepSpeed {kind}, {'1 node' if n == 1 else '2-16 nodes' if n <= 16 else '> 16 nodes'}"
    if r["engine"] == "nanotron":
        if p["micro_batch"] < p["tp"]:
            return "nanotron, host-bound"
        return "nanotron, full memory" if (r["measured"]["peak_mem_GB"] or 0) >= 68 else f"nanotron, {'1-8' if n <= 8 else '16' if n == 16 else '32-64'} nodes"
    return r["engine"].split(",")[0] + (", 1 node" if n == 1 else ", nodes")


def spearman(a, b):
    rk = lambda v: {i: k for k, i in enumerate(sorted(range(len(v)), key=v.__getitem__))}
    x, y, n = rk(a), rk(b), len(a)
    m = (n - 1) / 2
    return sum((x[i] - m) * (y[i] - m) for i in range(n)) / max(1e-9, sum((i - m) ** 2 for i in range(n)))


def score(rs, es):
    rows, groups = {}, {}
    for r, e in zip(rs, es):
        if not e.get("time"):
            rows.setdefault("unanswered", []).append((0, None, None)); continue
        want, got, held = seconds(r), e["time"]["step_seconds"], r["measured"]["peak_mem_GB"]
        band = e["time"].get("step_error_fraction")
        rows.setdefault(regime(r), []).append((got / want - 1, None if band is None else abs(got / want - 1) <= band, held and e["memory"]["peak_bytes"] / 1e9 / held - 1))
        b = r["parallel"]["global_batch"]
        if r["engine"] == "nanotron":
            n = r["hardware"]["nodes"]
            groups.setdefault(("nanotron 1-8 nodes" if n <= 8 else "nanotron 16-64 nodes", r["id"].split("-")[1], n), []).append((got / b, want / b, e["memory"]["peak_bytes"] / 1e9 <= 72.8))
    table = {k: dict(n=len(v), time_mape=mean(abs(x) for x, _, _ in v), time_bias=mean(x for x, _, _ in v), in_band=in_band(v),
                     mem_n=len(w), mem_mape=(mean(map(abs, w)) if w else None)) for k, v in sorted(rows.items()) for w in [[m for _, _, m in v if m is not None]]}
    choice = {}
    for (name, *_), v in groups.items():
        if len(v) >= 6:
            fit = [x for x in v if x[2]] or v
            choice.setdefault(name, []).append((min(fit)[1] / min(w for _, w, _ in v) - 1, spearman([g for g, _, _ in v], [w for _, w, _ in v])))
    choice = {k: dict(groups=len(v), regret_mean=mean(a for a, _ in v), regret_median=median(a for a, _ in v), regret_max=max(a for a, _ in v), spearman=mean(b for _, b in v)) for k, v in choice.items()}
    ds = [x for k, v in rows.items() if k.startswith("DeepSpeed") for x in v]
    return dict(regimes=table, choice=choice, deepspeed=dict(n=len(ds), time_mape=mean(abs(x) for x, _, _ in ds), in_band=in_band(ds)))


def in_band(v):
    """Of the rows that a band is printed for; None where it is for none."""
    told = [b for _, b, _ in v if b is not None]
    return mean(told) if told else None


def show(s):
    for k, v in s["regimes"].items():
        print(f"{k:34s} n={v['n']:4d} time {v['time_mape']:6.1%} bias {v['time_bias']:+7.1%} in band {'-' if v['in_band'] is None else format(v['in_band'], '.0%'):>4s}"
              + (f" | memory n={v['mem_n']} {v['mem_mape']:.1%}" if v["mem_n"] else ""))
    for k, v in s["choice"].items():
        print(f"{k:34s} {v['groups']} groups: regret mean {v['regret_mean']:.1%} median {v['regret_median']:.1%} max {v['regret_max']:.1%}, Spearman {v['spearman']:.2f}")
    print(f"DeepSpeed, all: n={s['deepspeed']['n']} time {s['deepspeed']['time_mape']:.1%}, in band {'-' if s['deepspeed']['in_band'] is None else format(s['deepspeed']['in_band'], '.0%')}")


if __name__ == "__main__":
    rs = json.loads(Path(sys.argv[1] if len(sys.argv) > 1 else HERE / "engines.json").read_text())
    show(score(rs, estimates(rs)))
