"""Endpoints in the order in which they are written, for tests that say which is asked first."""

from collections.abc import Iterable

import msgspec

from stormline.wire.plan import Endpoint

_MOST = 10**15


def ranked(endpoints: Iterable[Endpoint]) -> tuple[Endpoint, ...]:
    """Give each endpoint so much more weight than the next that dispatch leaves the order as it is.

    Of two or three, one device in ten million gets another order; each endpoint of its own counts once.
    """
    distinct = list(dict.fromkeys(endpoints))
    step = round(_MOST ** (1 / max(1, len(distinct) - 1)))
    return tuple(
        msgspec.structs.replace(each, weight=max(1, _MOST // step**at)) if each.weight else each
        for at, each in enumerate(distinct)
    )
