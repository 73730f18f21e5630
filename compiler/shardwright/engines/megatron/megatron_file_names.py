"""Names that the compile knows without what stands behind them."""

ARGUMENTS_FILE = "megatron_args.sh"
