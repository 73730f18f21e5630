"""An alias: open_session and Session are public at the package's top."""

from shardwright import Session as Session
from shardwright import open_session as open_session
