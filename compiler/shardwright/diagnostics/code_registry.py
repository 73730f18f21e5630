"""The registry of diagnostic codes: one dict literal per family, merged here.

SW1 recipe, SW2 model, SW3 strategy, SW4 ds_config (SW49 Megatron-LM's arguments), SW5 launch, SW6
run.
"""

from shardwright.diagnostics.ds_config_codes import DS_CONFIG_CODES
from shardwright.diagnostics.launch_codes import LAUNCH_CODES
from shardwright.diagnostics.megatron_args_codes import MEGATRON_ARGS_CODES
from shardwright.diagnostics.model_codes import MODEL_CODES
from shardwright.diagnostics.recipe_codes import RECIPE_CODES
from shardwright.diagnostics.run_codes import RUN_CODES
from shardwright.diagnostics.strategy_codes import STRATEGY_CODES

CODES: dict[str, str] = {
    **RECIPE_CODES,
    **MODEL_CODES,
    **STRATEGY_CODES,
    **DS_CONFIG_CODES,
    **MEGATRON_ARGS_CODES,
    **LAUNCH_CODES,
    **RUN_CODES,
}
