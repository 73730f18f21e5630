"""The registry of diagnostic codes: one dict literal per family, merged here.

SW1 recipe, SW2 model, SW3 strategy, SW4 ds_config (SW49 Megatron-LM's arguments), SW5 launch, SW6
run.
"""

from shardwright.diagnostics.codes.ds_config import DS_CONFIG_CODES
from shardwright.diagnostics.codes.launch import LAUNCH_CODES
from shardwright.diagnostics.codes.megatron_args import MEGATRON_ARGS_CODES
from shardwright.diagnostics.codes.model import MODEL_CODES
from shardwright.diagnostics.codes.recipe import RECIPE_CODES
from shardwright.diagnostics.codes.run import RUN_CODES
from shardwright.diagnostics.codes.strategy import STRATEGY_CODES

CODES: dict[str, str] = {
    **RECIPE_CODES,
    **MODEL_CODES,
    **STRATEGY_CODES,
    **DS_CONFIG_CODES,
    **MEGATRON_ARGS_CODES,
    **LAUNCH_CODES,
    **RUN_CODES,
}
