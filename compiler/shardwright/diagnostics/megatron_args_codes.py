"""SW49xx: one line a code, what is wrong in general with the arguments of Megatron-LM's
pretrain_gpt.py.

`explain` has a text for each: megatron_args.toml, beside this file.
"""

MEGATRON_ARGS_CODES: dict[str, str] = {
    "SW4900": "no option of Megatron-LM in the file",
    "SW4901": "an option that Megatron-LM's parser does not have",
    "SW4902": "a value that Megatron-LM's parser does not take",
    "SW4911": "degrees that do not divide the world",
    "SW4912": "a batch that does not divide over Megatron's data ranks",
    "SW4913": "layers that do not divide over pipeline ranks",
    "SW4921": "layers of a pipeline rank that do not divide over virtual stages",
    "SW4922": "micro-batches that do not make up the interleaved schedule's groups",
    "SW4923": "expert ranks that do not divide the world",
    "SW4924": "experts over tensor ranks without sequence parallelism",
}
