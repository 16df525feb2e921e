"""The laboratory's DNS server: truthful, lying, slow, empty or silent, as its `specs.DnsSpec` says.

UDP and TCP on port 53 (RFC 1035), and the answers for DNS over HTTPS (RFC 8484), which the origin serves.
"""

import asyncio
import contextlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Final, cast

import dns.exception
import dns.flags
import dns.message
import dns.name
import dns.rcode
import dns.rdataclass
import dns.rdatatype
import dns.rrset

from stormline.core import limits_lab
from stormline.core.clock import Rng
from stormline.lab.specs import DnsSpec

PORT: Final = 53
_UDP_BYTES_MIN: Final = 512
_TCP_BYTES_MAX: Final = 65_535
_FAMILIES: Final = {dns.rdatatype.A: ".", dns.rdatatype.AAAA: ":"}


class Zone:
    """What the server knows, and how it answers now."""

    def __init__(self, names: Mapping[str, Sequence[str]], lies: Sequence[str], spec: DnsSpec, rng: Rng) -> None:
        """Take the true addresses of names and the addresses given in lies."""
        self._names = {dns.name.from_text(name): list(addresses) for name, addresses in names.items()}
        self._lies = list(lies)
        self._rng = rng
        self.spec = spec
        """How plain DNS answers; may be changed at any time."""
        self.questions = 0
        """Questions by UDP and TCP so far."""
        self.doh_questions = 0
        """Questions over HTTPS so far."""

    def answer_plain(self, question: bytes, *, udp: bool) -> bytes | None:
        """Answer a question as the spec says; None: no answer at all."""
        self.questions += 1
        draw = self._rng.random() * 100
        for pct, kind in (
            (self.spec.drop_pct, "drop"),
            (self.spec.lie_pct, "lie"),
            (self.spec.empty_pct, "empty"),
            (self.spec.nxdomain_pct, "nxdomain"),
            (self.spec.servfail_pct, "servfail"),
        ):
            if draw < pct:
                return self._answer(question, kind, udp)
            draw -= pct
        return self._answer(question, "truth", udp)

    def answer_https(self, question: bytes) -> bytes | None:
        """Answer a question that came over HTTPS; None: it is no question."""
        self.doh_questions += 1
        if self.spec.doh_honest:
            return self._answer(question, "truth", False)
        return self.answer_plain(question, udp=False)

    def _answer(self, question: bytes, kind: str, udp: bool) -> bytes | None:
        if kind == "drop":
            return None
        try:
            query = dns.message.from_wire(question)
            if not query.question or query.flags & dns.flags.QR:
                return None
            answer = dns.message.make_response(query, recursion_available=True)
        except (dns.exception.DNSException, ValueError, struct.error):
            return None
        asked = query.question[0]
        addresses = self._names.get(asked.name)
        if kind == "servfail":
            answer.set_rcode(dns.rcode.SERVFAIL)
        elif addresses is None or kind == "nxdomain":
            answer.set_rcode(dns.rcode.NXDOMAIN)
        elif kind != "empty":
            self._fill(answer, asked, self._lies if kind == "lie" else addresses)
        try:
            # Without EDNS a datagram holds 512 bytes (RFC 1035 section 4.2.1).
            return answer.to_wire(max_size=max(_UDP_BYTES_MIN, query.payload) if udp else _TCP_BYTES_MAX)
        except dns.exception.TooBig:
            answer.answer.clear()
            answer.flags |= dns.flags.TC
            return answer.to_wire()

    def _fill(self, answer: dns.message.Message, asked: dns.rrset.RRset, addresses: Sequence[str]) -> None:
        mark = _FAMILIES.get(asked.rdtype)
        fitting = [address for address in addresses if mark and mark in address]
        if fitting and asked.rdclass == dns.rdataclass.IN:
            # Round robin by chance, as large sites do: no address is everybody's first.
            first = int(self._rng.random() * len(fitting))
            rotated = [*fitting[first:], *fitting[:first]]
            answer.answer.append(dns.rrset.from_text_list(asked.name, self.spec.ttl_s, "IN", asked.rdtype, rotated))


class _Udp(asyncio.DatagramProtocol):
    def __init__(self, zone: Zone) -> None:
        self._zone = zone
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)  # Python 3.11's is none by inheritance

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        answer = self._zone.answer_plain(data, udp=True)
        if answer is None:
            return
        if self._zone.spec.delay_s:
            asyncio.get_running_loop().call_later(self._zone.spec.delay_s, self._send, answer, addr)
        else:
            self._send(answer, addr)

    def _send(self, answer: bytes, peer: tuple[str, int]) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.sendto(answer, peer)


async def serve(zone: Zone, address: str) -> Callable[[], None]:
    """Answer on UDP and TCP port 53 of an address.

    Returns:
        What ends it.

    Raises:
        OSError: the port cannot be bound.
    """
    loop = asyncio.get_running_loop()
    transport, _ = await loop.create_datagram_endpoint(lambda: _Udp(zone), (address, PORT))

    async def serve_tcp(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            while True:
                (length,) = struct.unpack("!H", await reader.readexactly(2))
                answer = zone.answer_plain(await reader.readexactly(length), udp=False)
                if answer is None:
                    continue
                await asyncio.sleep(zone.spec.delay_s)
                writer.write(struct.pack("!H", len(answer)) + answer)
                await writer.drain()
        writer.close()

    try:
        server = await asyncio.start_server(serve_tcp, address, PORT, backlog=limits_lab.LAB_BACKLOG)
    except OSError:
        transport.close()
        raise

    def close() -> None:
        transport.close()
        server.close()

    return close
