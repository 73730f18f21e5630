from typing import Any


class Format:
    E4M3, HYBRID = "e4m3", "hybrid"


class DelayedScaling:
    pass


class _Recipe:
    def __init__(self, fp8_format: str = "e2m1", **more: Any) -> None:
        self.format = fp8_format


class Float8CurrentScaling(_Recipe):
    pass


class Float8BlockScaling(_Recipe):
    pass


class MXFP8BlockScaling(_Recipe):
    pass


class NVFP4BlockScaling(_Recipe):
    pass
