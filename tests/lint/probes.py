"""What the installed DeepSpeed does with each rule's `example`, and with its `instead`: one entry a
rule, and more of them where a rule covers more than one thing.

refuses: the example raises an error with these words. Else `fact`: a function of both outcomes that
is true where the example has no effect, or another one than it says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from shardwright.utils.numeric_difference import max_series_diff

Facts = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """at: how far to go (probe_worker.py). example, instead: in place of the explanation's. logged:
    words of a warning that DeepSpeed gives. instead_at: where the other runs, "" for nowhere (no
    such device here)."""

    at: str = "config"
    refuses: str = ""
    fact: Callable[[Facts, Facts], bool] | None = None
    logged: str = ""
    example: Any = None
    instead: Any = None
    instead_at: str | None = None
    options: Facts = field(default_factory=dict)


def _config(**keys: Any) -> dict[str, Any]:
    return {"train_batch_size": 8, **keys}


def _zero(stage: int, **keys: Any) -> dict[str, Any]:
    return _config(zero_optimization={"stage": stage, **keys})


def near(facts: Facts) -> bool:
    """The losses are those of a plain loop."""
    return max_series_diff(facts["losses"], facts["plain"]) < 1e-5


def drift(facts: Facts) -> float:
    """The largest relative difference from the losses of the same engine in fp32."""
    pairs = zip(facts["losses"], facts["plain"], strict=True)
    return max((float(abs(loss / plain - 1)) for loss, plain in pairs), default=0.0)


ON = {"enabled": True}
FAST = {"type": "AdamW", "params": {"lr": 1e-2}}
PIPELINE = {"pipeline": True}
AUTOTP = {
    "tensor_parallel": {
        "autotp_size": 2,
        "partition_config": {
            "use_default_specs": False,
            "layer_specs": [{"patterns": [r"^0\.weight$"], "partition_type": "column"}],
        },
    }
}

PROBES: dict[str, list[Probe]] = {
    "SW4001": [
        Probe(
            at="file",
            refuses="Error",
            example="",
            instead="",
            instead_at="",
            options={"file": "none"},
        )
    ],
    "SW4002": [
        Probe(
            at="file",
            refuses="IsADirectoryError",
            example="",
            instead_at="",
            options={"file": "folder"},
        ),
    ],
    "SW4003": [
        Probe(
            at="file",
            refuses="UnicodeDecodeError",
            example='{"train_batch_size": 8, "_by": "Andr\xe9"}',
            instead_at="",
            options={"file": "latin-1"},
        )
    ],
    "SW4004": [Probe(at="file", refuses="needs to be provided")],
    "SW4005": [
        Probe(at="file", refuses="HjsonDecodeError"),
        Probe(at="trainer_file", refuses="JSONDecodeError"),
    ],
    "SW4006": [Probe(at="file", refuses="Duplicate keys")],
    "SW4007": [Probe(at="file", refuses="AttributeError")],
    "SW4008": [Probe(at="trainer_file", refuses="JSONDecodeError")],
    "SW4111": [
        Probe(refuses="Extra inputs are not permitted"),
        Probe(
            refuses="Extra inputs are not permitted",
            example=_config(bf16={"enabled": True, "loss_scale": 0}),
            instead=_config(bf16={"enabled": True}),
        ),
    ],
    "SW4112": [Probe(fact=lambda bad, good: (bad["stage"], good["stage"]) == (0, 2))],
    "SW4113": [Probe(fact=lambda bad, good: bad == good)],
    "SW4114": [
        Probe(
            at="engine",
            fact=lambda bad, good: (bad["learning_rate"], good["learning_rate"]) == (1e-3, 5e-5),
        ),
    ],
    "SW4115": [
        Probe(refuses="must be a mapping"),
        Probe(refuses="NoneType", example=_config(optimizer=None), instead=_config()),
        Probe(
            refuses="instance of dtype",
            example=_config(tensor_parallel={"dtype": "bf16"}),
            instead=_config(),
        ),
    ],
    "SW4116": [
        Probe(at="step", refuses="TypeError"),
        Probe(
            fact=lambda bad, good: bool(bad["dump_state"]) and not good["dump_state"],
            example=_config(dump_state="false"),
            instead=_config(dump_state=False),
        ),
        Probe(
            fact=lambda bad, good: bad["stage"] == good["stage"] == 2,
            example=_zero(2) | {"zero_optimization": {"stage": "2"}},
            instead=_zero(2),
        ),
        Probe(
            fact=lambda bad, good: bad["bf16"] is good["bf16"] is False,
            example=_config(bf16={"enabled": "false"}),
            instead=_config(bf16={"enabled": False}),
        ),
        Probe(
            fact=lambda bad, good: bad["bf16"] is good["bf16"] is True,
            example=_config(bf16={"enabled": "true"}),
            instead=_config(bf16={"enabled": True}),
        ),
        Probe(
            at="filled",
            fact=lambda bad, good: bad["trainer_bf16"] and not good["trainer_bf16"],
            example=_zero(1) | {"bf16": {"enabled": "false"}},
            instead=_zero(1) | {"bf16": {"enabled": False}},
        ),
    ],
    "SW4117": [
        Probe(refuses="Invalid communication_data_type"),
        Probe(
            at="partition_config",
            fact=lambda bad, good: good["found"] and not bad["found"],
            example={"tensor_parallel": {"preset_model": "llama4"}},
            instead={"tensor_parallel": {"preset_model": "llama"}},
        ),
        Probe(
            at="partition_config",
            refuses="not a valid PartitionType",
            example={
                "tensor_parallel": {
                    "partition_config": {
                        "layer_specs": [{"patterns": ["a"], "partition_type": "col"}]
                    }
                }
            },
            instead={
                "tensor_parallel": {
                    "partition_config": {
                        "layer_specs": [{"patterns": ["a"], "partition_type": "row"}]
                    }
                }
            },
        ),
    ],
    "SW4118": [
        Probe(refuses="greater than 0"),
        Probe(
            refuses="greater than 0",
            example={"train_batch_size": 0},
            instead={"train_batch_size": 8},
        ),
        Probe(
            at="step",
            refuses="ZeroDivisionError",
            example=_config(steps_per_print=0),
            instead=_config(steps_per_print=1),
        ),
    ],
    "SW4119": [
        Probe(refuses="TypeError"),
        Probe(
            fact=lambda bad, good: good["bf16"] and not bad["bf16"],
            example=_config(bf16={"enabled": "auto"}),
            instead=_config(bf16={"enabled": True}),
        ),
    ],
    "SW4120": [Probe(at="filled", refuses="without `auto`")],
    "SW4121": [Probe(refuses="removed")],
    "SW4122": [
        Probe(at="config", logged="cpu_offload is deprecated", fact=lambda bad, good: bad == good)
    ],
    "SW4123": [Probe(refuses="Cannot provide deprecated parameter")],
    "SW4124": [Probe(fact=lambda bad, good: good["fp16"] and not bad["fp16"])],
    "SW4201": [Probe(refuses="needs to be provided")],
    "SW4202": [Probe(refuses="Check batch related parameters")],
    "SW4203": [Probe(refuses="Check batch related parameters")],
    "SW4204": [
        Probe(at="groups", fact=lambda bad, good: bad["data"] == 8 / 3 and good["data"] == 4),
        Probe(
            at="groups",
            refuses="IndexError",
            example=_config(tensor_parallel={"autotp_size": 3}),
            instead=_config(tensor_parallel={"autotp_size": 2}),
        ),
        Probe(
            at="groups",
            refuses="8 is not divisible by 3",
            example=_zero(3, zero_hpz_partition_size=3),
            instead=_zero(3, zero_hpz_partition_size=16),
        ),
    ],
    "SW4205": [
        Probe(at="mesh", refuses="IndexError"),
        Probe(
            at="mesh",
            refuses="should not be bigger",
            example={"data_parallel_size": 4, "sequence_parallel_size": 4},
            instead={"data_parallel_size": 2, "sequence_parallel_size": 4},
        ),
    ],
    "SW4207": [
        Probe(at="filled", refuses="Check batch related parameters", options={"accumulation": 4})
    ],
    "SW4301": [Probe(refuses="cannot be simultaneously enabled")],
    "SW4302": [Probe(at="step", refuses="unsupported mix")],
    "SW4303": [Probe(at="step", refuses="conflicts with the enabled precision")],
    "SW4304": [
        Probe(at="step", refuses="Master weights feature requires"),
        Probe(
            refuses="only supported with ZeRO",
            example=_config(fp16={"enabled": True, "fp16_master_weights_and_grads": True}),
            instead=_zero(1) | {"fp16": {"enabled": True, "fp16_master_weights_and_grads": True}},
        ),
    ],
    "SW4305": [Probe(refuses="requires bf16_master_weights_and_grads")],
    "SW4306": [
        Probe(
            at="engine",
            fact=lambda bad, good: good["dynamic_scale"] and not bad["dynamic_scale"],
            example=_config(
                fp16={"enabled": False, "loss_scale": 128, "initial_scale_power": 20}
            ),  # no fp16 on a CPU
            instead=_config(fp16={"enabled": False, "loss_scale": 0, "initial_scale_power": 20}),
        )
    ],
    "SW4307": [
        Probe(refuses="loss_scale_window must be > 0"),
        Probe(
            refuses="must be >= 0",
            example=_config(fp16={"enabled": True, "loss_scale": -1}),
            instead=_config(fp16={"enabled": True, "loss_scale": 0}),
        ),
    ],
    "SW4308": [Probe(fact=lambda bad, good: good["bf16"] and not bad["bf16"])],
    "SW4309": [
        Probe(
            at="step",
            options=PIPELINE,
            fact=lambda bad, good: (
                (bad["accumulates"], good["accumulates"]) == ("torch.bfloat16", "torch.float32")
            ),
        )
    ],
    "SW4310": [
        Probe(
            at="step",
            options={"precision": "bf16"},
            fact=lambda bad, good: drift(bad) > 0.1 > 0.02 > drift(good),
            example=_zero(0) | {"bf16": ON, "optimizer": FAST},
            instead=_zero(1) | {"bf16": ON, "optimizer": FAST},
        )
    ],
    "SW4311": [
        Probe(
            at="step",
            fact=lambda bad, good: (
                (bad["scaled"], good["scaled"]) == ("torch.bfloat16", "torch.float32")
            ),
        ),
        Probe(
            at="step",
            refuses="No inf checks were recorded",
            example=_config(bf16=ON, torch_autocast={**ON, "dtype": "float16"}),
            instead=_config(torch_autocast={**ON, "dtype": "float16"}),
        ),
    ],
    "SW4401": [
        Probe(
            at="step",
            fact=lambda bad, good: bad["wrapper"] == "DeepSpeedZeroOptimizer" != good["wrapper"],
        )
    ],
    "SW4402": [
        Probe(
            at="step",
            fact=lambda bad, good: not bad["offloads"] and bad["stage"] == 2,
            instead_at="engine",
        )
    ],
    "SW4403": [
        Probe(at="step", fact=lambda bad, good: good["offloads"] and bad["wrapper"] == "AdamW")
    ],
    "SW4404": [
        Probe(at="engine", refuses="cannot be None if remote device is", instead_at=""),
        Probe(
            at="engine",
            refuses="NoneType",
            example=_zero(3, offload_optimizer={"device": "nvme"}),
            instead_at="",
        ),
    ],
    "SW4405": [
        Probe(
            at="step",
            fact=lambda bad, good: (
                bad["offloads"] and not bad["swaps"] and bad["wrapper"] == good["wrapper"]
            ),
        )
    ],
    "SW4406": [Probe(at="step", fact=lambda bad, good: not bad["swaps"] and bad == good)],
    "SW4407": [Probe(refuses="Partial offloading only supported for ZeRO Stage 3")],
    "SW4408": [
        Probe(
            at="step",
            fact=lambda bad, good: (bad["hpz"], good["hpz"]) == (None, 8),
            instead_at="engine",
        )
    ],
    "SW4409": [
        Probe(at="step", refuses="requires gradient_clipping=0"),
        Probe(
            refuses="only with ZeRO Stage 1 or 2",
            example=_zero(3, compute_grad_norm=False),
            instead=_zero(3),
        ),
        Probe(
            at="engine",
            refuses="does not support optimizer offload",
            example=_zero(2, compute_grad_norm=False, offload_optimizer={"device": "cpu"})
            | {"gradient_clipping": 0},
            instead=_zero(2, offload_optimizer={"device": "cpu"}) | {"gradient_clipping": 0},
        ),
    ],
    "SW4410": [Probe(refuses="not supported with ZeRO stage 3")],
    "SW4411": [
        Probe(at="step", refuses="pre-scale gradients is not yet supported"),
        Probe(
            at="engine",
            refuses="gradient_predivide_factor != 1.0",
            example=_zero(3) | {"gradient_predivide_factor": 2.0},
            instead=_zero(1) | {"gradient_predivide_factor": 2.0},
        ),
    ],
    "SW4412": [Probe(at="engine", refuses="deprecated version of ZeRO Stage 1")],
    "SW4413": [
        Probe(
            logged="elastic checkpointing is deprecated", fact=lambda bad, good: True, instead_at=""
        )
    ],
    "SW4414": [Probe(at="engine", refuses="allgather_bucket_size must be a multiple")],
    "SW4415": [
        Probe(
            at="engine",
            options={"save": True},
            fact=lambda bad, good: good["saved"] and not bad["saved"],
            example=_zero(3, stage3_gather_16bit_weights_on_model_save=False),
            instead=_zero(3, stage3_gather_16bit_weights_on_model_save=True),
        ),
        Probe(
            at="ranks",
            options={"gather": True},
            refuses="Cannot get 16bit model weights",
            example=_zero(1) | AUTOTP,
            instead=_zero(1, gather_16bit_weights_on_model_save=True) | AUTOTP,
        ),
    ],
    "SW4416": [
        Probe(at="step", fact=lambda bad, good: bad["wrapper"] == "DeepSpeedZeroOptimizer_Stage3")
    ],
    "SW4417": [
        Probe(at="engine", refuses="Zenflow must be used with cpu offload", instead_at="config")
    ],
    "SW4418": [
        Probe(
            at="step",
            fact=lambda bad, good: bad["offloads"] and not bad["super"],
            instead_at="config",
        )
    ],
    "SW4419": [
        Probe(
            logged="this format of ZeRO optimization setup is deprecated",
            fact=lambda bad, good: bad == good,
        )
    ],
    "SW4420": [
        Probe(
            at="engine",
            refuses="supports ZeRO overlap_comm only with ZeRO stage 2",
            instead=_zero(stage, overlap_comm=True) | {"managed_gradient_accumulation": False},
        )
        for stage in (2, 3)
    ],
    "SW4421": [
        Probe(
            at="groups",
            fact=lambda bad, good: (
                set(bad["tensor"]) <= set(bad["copied"]) and bad["tensor"] == [6, 7]
            ),
            options={"world_size": 8},
        )
    ],
    "SW4501": [Probe(at="engine", refuses="is not a supported DeepSpeed Optimizer")],
    "SW4502": [Probe(at="engine", refuses="is not a supported DeepSpeed Optimizer")],
    "SW4503": [Probe(at="engine", refuses="'max_grad_norm' is not supported")],
    "SW4504": [
        Probe(at="engine", refuses="unexpected keyword argument 'freeze_step'"),
        *(
            # What does not fail is FusedAdam, which is compiled for GPUs.
            Probe(
                at="engine",
                refuses=refuses,
                example=_config(optimizer={"type": "AdamW", "params": {name: True}}),
                instead=_config(
                    optimizer={"type": "AdamW", "params": {name: True, "torch_adam": True}}
                ),
                options={"deepspeeds_adam": True},
            )
            for name, refuses in (
                ("fused", "FusedAdam.__init__() got an unexpected keyword argument 'fused'"),
                ("amsgrad", "FusedAdam does not support the AMSGrad variant"),
            )
        ),
    ],
    "SW4505": [Probe(at="step", refuses="must provide optimizer")],
    "SW4506": [
        Probe(at="engine", fact=lambda bad, good: bad["decoupled"] and good["decoupled"]),
        Probe(
            at="engine",
            fact=lambda bad, good: bad["decoupled"] and not good["decoupled"],
            instead=_config(
                optimizer={"type": "Adam", "params": {"weight_decay": 0.1, "adam_w_mode": False}}
            ),
        ),
    ],
    "SW4507": [Probe(at="engine", refuses="requires dynamic loss scaling", instead_at="config")],
    "SW4508": [Probe(at="engine", refuses="does not recognize LR scheduler")],
    "SW4509": [Probe(at="engine", refuses="must be a mapping")],
    "SW4510": [Probe(at="engine", refuses="unexpected keyword argument 'warmup_max_lr'")],
    "SW4511": [
        Probe(at="engine", refuses="missing 1 required positional argument: 'total_num_steps'")
    ],
    "SW4512": [Probe(at="engine", refuses="must be a positive integer")],
    "SW4513": [
        Probe(at="engine", logged="is less than warmup_num_steps", fact=lambda bad, good: True)
    ],
    "SW4514": [
        Probe(
            at="engine",
            logged="unknown warmup_type",
            fact=lambda bad, good: (bad["warmup_type"], good["warmup_type"]) == ("log", "linear"),
        )
    ],
    "SW4515": [
        Probe(at="engine", refuses="is not an Optimizer"),
        Probe(
            at="engine",
            refuses="is not an Optimizer",
            example=_config(
                bf16={"enabled": True}, scheduler={"type": "StepLR", "params": {"step_size": 9}}
            ),
            instead=_config(scheduler={"type": "StepLR", "params": {"step_size": 9}}),
        ),
    ],
    "SW4516": [
        Probe(
            at="step",
            fact=lambda bad, good: bad["scheduler"] is None and good["scheduler"] == "WarmupLR",
        )
    ],
    "SW4517": [Probe(at="engine", refuses="Muon and reduce scatter cannot be used together")],
    "SW4518": [Probe(at="engine", refuses="untested ZeRO Optimizer")],
    "SW4519": [Probe(at="engine", refuses="Invalid beta parameter")],
    "SW4520": [
        Probe(at="step", fact=lambda bad, good: (bad["peak"], good["peak"]) == (0.001, 2e-5)),
        Probe(
            at="step",
            fact=lambda bad, good: bad["peak"] == good["peak"] == 2e-5,
            example=_config(
                optimizer={"type": "AdamW", "params": {"lr": 2e-5}},
                scheduler={"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
            ),
            instead=_config(
                optimizer={"type": "AdamW", "params": {"lr": 2e-5}},
                scheduler={
                    "type": "WarmupLR",
                    "params": {"warmup_num_steps": 10, "warmup_max_lr": 2e-5},
                },
            ),
        ),
    ],
    "SW4601": [
        Probe(at="engine", options=PIPELINE, refuses="incompatible with pipeline parallelism")
    ],
    "SW4602": [
        Probe(
            at="step",
            options=PIPELINE,
            fact=lambda bad, good: bad == good and bad["pipeline_stages"] == 1,
        )
    ],
    "SW4603": [
        Probe(
            at="step",
            options={"pipeline": True, "embedding": True},
            refuses="loss must be a scalar tensor",
        )
    ],
    "SW4604": [
        Probe(
            at="engine",
            options=PIPELINE,
            logged="does not support overlapped communication",
            fact=lambda bad, good: bad["wrapper"] == good["wrapper"],
        )
    ],
    "SW4605": [
        Probe(at="engine", options=PIPELINE, refuses="not supported with pipeline parallelism")
    ],
    "SW4606": [Probe(at="checkpoint", refuses="only available with partitioned activations")],
    "SW4607": [
        Probe(
            at="step",
            fact=lambda bad, good: not bad["checkpointing"],
            example=_config(activation_checkpointing={"partition_activations": True}),
            instead_at="",
        )
    ],
    "SW4608": [Probe(fact=lambda bad, good: (bad["autotp_size"], good["autotp_size"]) == (0, 2))],
    "SW4609": [
        Probe(
            at="ranks", options={"stages": 2}, fact=lambda bad, good: near(good) and not near(bad)
        )
    ],
    "SW4610": [Probe(at="ranks", options={"stages": 1}, refuses="AssertionError")],
    "SW4611": [
        Probe(
            at="ranks",
            # What the two ranks' gradients add up to is the right one; DeepSpeed's clipping and
            # Adam hide the factor.
            fact=lambda bad, good: abs(bad["share"] - 0.5) < 1e-5 and abs(good["share"] - 1) < 1e-5,
            options={"sequence": True},
        ),
    ],
    "SW4613": [
        Probe(
            at="ranks",
            # The rows of a model without windows come out right, those of one with windows do not.
            fact=lambda bad, good: bad["whole"] < 1e-5 and bad["window"] > 1e-2,
            options={"ulysses": 2},
            example=_config(sequence_parallel_size=2),
            instead_at="",
        ),
    ],
    "SW4614": [
        Probe(
            at="ranks",
            refuses="is not divisible by SP size 2",
            options={"ulysses": 3},
            example=_config(sequence_parallel_size=2),
            instead_at="",
        ),
    ],
    "SW4701": [Probe(at="step", fact=lambda bad, good: not bad["swaps"], instead_at="config")],
    "SW4702": [Probe(refuses="curriculum_metrics must be specified")],
    "SW4703": [Probe(refuses="max_tokens must be specified")],
    "SW4704": [
        Probe(
            fact=lambda bad, good: (
                (bad["routing"], good["routing"]) == ([False, False, True], [True, True, True])
            )
        )
    ],
}
