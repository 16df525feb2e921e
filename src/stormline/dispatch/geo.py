"""Country and network operator of an address, from databases in MaxMind's format (GeoLite2, DB-IP, an own one).

Optional: needs the package `maxminddb`, and files that the operator brings.
"""

import importlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from stormline.core import errors
from stormline.dispatch.nearest import Found

_log = logging.getLogger("stormline.dispatch")


class GeoDatabases:
    """Open databases, asked together: one may know the country, the next the autonomous system.

    Args:
        paths: the files, mapped into memory for as long as this lives.

    Raises:
        ConfigError: a file cannot be read or is no such database, or `maxminddb` is not installed.
    """

    def __init__(self, paths: tuple[Path, ...]) -> None:
        try:
            maxminddb: Any = importlib.import_module("maxminddb")
        except ImportError:
            raise errors.ConfigError("dispatch: geo databases need the package maxminddb") from None
        self._broken: type[Exception] = maxminddb.InvalidDatabaseError
        self._readers: list[Any] = []
        for path in paths:
            try:
                self._readers.append(maxminddb.open_database(path))
            except (OSError, ValueError, self._broken) as error:
                self.close()
                raise errors.ConfigError(f"dispatch: cannot use the geo database {path}: {error}") from error

    def find(self, address: str) -> Found:
        """Give what the databases know of an IP address; a database that proves broken says nothing."""
        country, asn = "", 0
        for reader in self._readers:
            try:
                record = reader.get(address)
            except (ValueError, self._broken) as error:  # ValueError: an IPv6 address in an IPv4 database
                _log.debug("geo: %s", error)
                continue
            if not isinstance(record, Mapping):
                continue
            place = record.get("country") or record.get("registered_country")
            code = place.get("iso_code") if isinstance(place, Mapping) else None
            number = record.get("autonomous_system_number")
            country = country or (code if isinstance(code, str) else "")
            asn = asn or (number if isinstance(number, int) and not isinstance(number, bool) else 0)
        return Found(country, asn)

    def close(self) -> None:
        """Let go of the files. Safe to call twice."""
        for reader in self._readers:
            reader.close()
        self._readers.clear()
