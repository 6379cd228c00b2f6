"""ClientHello: the server name in the first message of a TLS client (RFC 8446 section 4.1.2, RFC 6066 section 3).

The bytes are a guest's. Each is looked at once, whatever pieces they come in; the message is bounded; and what could hide another
name is refused: a second name, an encrypted hello (RFC 9849 and its draft, ESNI), bytes after the message in its record.
"""

MOST_BYTES = 16_384  # of what a client sends before its name is known: one record; browsers send 2 KiB (own choice)
HANDSHAKE, CLIENT_HELLO = 22, 1
RECORD_HEAD, MESSAGE_HEAD = 5, 4
SERVER_NAME, HOST_NAME = 0, 0
ENCRYPTED = {0xFE0D: "an encrypted hello (ECH)", 0xFFCE: "an encrypted server name (ESNI)"}
ACCESS_DENIED = bytes((21, 3, 3, 0, 2, 2, 49))  # the alert that refuses a handshake (RFC 8446 section 6)


class HelloRefused(ValueError):
    """The client does not say plainly which server it wants; the text says what it does."""


class HelloReader:
    """Reads the server name from what a client sends first. `received`: all of that."""

    def __init__(self) -> None:
        self.received = bytearray()
        self._at = 0  # records before it are in `_message`
        self._message = bytearray()

    def feed(self, data: bytes) -> str | None:
        """Take more bytes; return the server name in lower case, None while it is incomplete. HelloRefused."""
        if len(self.received) + len(data) > MOST_BYTES:
            raise HelloRefused(f"no server name within {MOST_BYTES} bytes")
        self.received += data
        while len(self.received) - self._at >= RECORD_HEAD:
            head = self.received[self._at : self._at + RECORD_HEAD]
            size = int.from_bytes(head[3:])
            if head[0] != HANDSHAKE or head[1] != 3 or size == 0:
                raise HelloRefused("no TLS")
            end = self._at + RECORD_HEAD + size
            if len(self.received) < end:
                return None
            self._message += self.received[self._at + RECORD_HEAD : end]
            self._at = end
            if self._message[0] != CLIENT_HELLO:
                raise HelloRefused("no ClientHello")
            whole = MESSAGE_HEAD + int.from_bytes(self._message[1:MESSAGE_HEAD])
            if len(self._message) > whole:
                raise HelloRefused("more than a ClientHello in its record")
            if len(self._message) == whole:
                return _server_name(bytes(self._message[MESSAGE_HEAD:]))
        return None


class _Fields:
    """The fields of a structure, in order."""

    def __init__(self, data: bytes) -> None:
        self.left = data

    def take(self, size: int) -> bytes:
        if size > len(self.left):
            raise HelloRefused("a ClientHello that is cut off")
        taken, self.left = self.left[:size], self.left[size:]
        return taken

    def number(self, size: int) -> int:
        return int.from_bytes(self.take(size))

    def block(self, length_size: int) -> bytes:
        """Return a field that begins with its length."""
        return self.take(self.number(length_size))

    def only(self, length_size: int) -> "_Fields":
        """Return the fields of the last field, which begins with its length."""
        inner = _Fields(self.block(length_size))
        if self.left:
            raise HelloRefused("a ClientHello with bytes after its end")
        return inner


def _server_name(body: bytes) -> str:
    fields = _Fields(body)
    fields.take(2 + 32)  # version, random
    for length_size in (1, 2, 1):  # session, ciphers, compression
        fields.block(length_size)
    extensions, found = fields.only(2), list[bytes]()
    while extensions.left:
        kind, data = extensions.number(2), extensions.block(2)
        if kind in ENCRYPTED:
            raise HelloRefused(ENCRYPTED[kind])
        if kind == SERVER_NAME:
            found.append(data)
    if len(found) != 1:
        raise HelloRefused("no server name" if not found else "several server names")
    names = _Fields(found[0]).only(2)
    if names.number(1) != HOST_NAME:
        raise HelloRefused("a server name of an unknown kind")
    name = names.block(2)
    if names.left:
        raise HelloRefused("several server names")
    if not name.isascii():
        raise HelloRefused("a server name that is not ASCII")
    return name.decode().lower()
