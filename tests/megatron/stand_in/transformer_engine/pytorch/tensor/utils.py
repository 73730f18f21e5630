from typing import Any


def replace_raw_data(*args: Any) -> None:
    raise AssertionError("nothing here computes in fp8")


cast_master_weights_to_fp8 = replace_raw_data
