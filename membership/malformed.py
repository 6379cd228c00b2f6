"""The errors of decoding bytes that another node wrote."""

import msgspec

# Deeply nested values in a field that this version does not know end the decoder's recursion.
MALFORMED = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
