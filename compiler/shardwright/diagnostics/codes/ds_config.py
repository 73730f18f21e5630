"""SW4xxx: one line a code, what is wrong in general."""

DS_CONFIG_CODES: dict[str, str] = {
    "SW4101": "DeepSpeed's AutoTP cannot express the tensor-parallel map",
}
