"""SW4xxx: one line a code, what is wrong in general."""

DS_CONFIG_CODES: dict[str, str] = {}
