"""The keys of this platform's relay in the rules: whoever wrote them, and whenever, plans name the ones in use.

The rules hold a relay's keys as they were when somebody wrote them down; a file, a version gone back to and settings of
before all bring old ones. So each relay in the rules that has a key of ours, of now or of the past, is given those of
now: before rules are taken, and again where the keys or the rules change.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Final

import msgspec

from stormline.core import errors, limits_platform, limits_relay
from stormline.dispatch import rules as dispatch_rules
from stormline.dispatch.book import PLATFORM, Book
from stormline.dispatch.editor import Author, Editor
from stormline.dispatch.rules import RuleSet
from stormline.wire import jws, ohttp
from stormline.wire.plan import Endpoint, HostPlan, Policy

_log = logging.getLogger("stormline.dispatch")
_WHY: Final = "the relay has other keys"


class RelayKeys(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What rules may say of the relay's keys; nothing in it is secret.

    Attributes:
        listed: the keys of now, as rules and plans have them.
        former: public keys of the past, base64url, the newest first.
    """

    listed: str = ""
    former: tuple[str, ...] = ()

    def then(self, listed: str) -> "RelayKeys":
        """Give what is to be known once these are the keys of now."""
        now = _public(listed)
        former = dict.fromkeys(each for each in (*_public(self.listed), *self.former) if each not in now)
        return RelayKeys(listed=listed, former=tuple(former)[: limits_relay.RELAY_FORMER_KEYS_MAX])

    @property
    def known(self) -> frozenset[str]:
        """Every public key of ours."""
        return frozenset((*_public(self.listed), *self.former))


def _public(listed: str) -> tuple[str, ...]:
    return tuple(jws.b64url(key.public) for key in ohttp.decode_keys(jws.b64url_decode(listed)))


def read(path: Path) -> RelayKeys:
    """Read what is known of the relay's keys; nothing where there is no file.

    Raises:
        ConfigError: it cannot be read, or is damaged.
    """
    try:
        with path.open("rb") as file:
            data = file.read(limits_platform.PLATFORM_FILE_BYTES_MAX)
        told = msgspec.json.decode(data, type=RelayKeys)
        _ = told.known
    except FileNotFoundError:
        return RelayKeys()
    except OSError as error:
        raise errors.ConfigError(f"{path}: cannot read the relay's keys: {error.strerror}") from error
    except (msgspec.MsgspecError, ValueError, errors.RemoteProtocolError) as error:
        raise errors.ConfigError(f"{path}: no keys of a relay: {error}") from error
    return told


def renewed(rules: RuleSet, told: RelayKeys) -> RuleSet:
    """Give rules in which every relay of ours has the keys of now; the same object where they are so already."""
    if not told.listed:
        return rules
    known = told.known
    changed = {}
    for host, plan in rules.hosts.items():
        fresh = _renewed_host(plan, known, told.listed)
        if fresh is not plan:
            changed[host] = fresh
    return msgspec.structs.replace(rules, hosts={**rules.hosts, **changed}) if changed else rules


def _renewed_host(plan: HostPlan, known: frozenset[str], listed: str) -> HostPlan:
    policy = plan.policy and _renewed_policy(plan.policy, known, listed)
    policies = [_renewed_policy(each.policy, known, listed) for each in plan.paths]
    if policy is plan.policy and all(a is b.policy for a, b in zip(policies, plan.paths, strict=True)):
        return plan
    paths = [msgspec.structs.replace(each, policy=new) for each, new in zip(plan.paths, policies, strict=True)]
    return msgspec.structs.replace(plan, policy=policy, paths=tuple(paths))


def _renewed_policy(policy: Policy, known: frozenset[str], listed: str) -> Policy:
    relays = tuple(
        msgspec.structs.replace(each, keys=listed) if _is_old(each, known, listed) else each for each in policy.relays
    )
    return policy if relays == policy.relays else msgspec.structs.replace(policy, relays=relays)


def _is_old(relay: Endpoint, known: frozenset[str], listed: str) -> bool:
    if relay.keys == listed:
        return False
    with contextlib.suppress(ValueError, errors.RemoteProtocolError):
        return not known.isdisjoint(_public(relay.keys))
    return False


class Keeper:
    """Keeps the keys in the rules those of now. Belongs to one event loop.

    Args:
        path: file of `RelayKeys`; looked at again and again.
        book: the rules this centre serves.
    """

    def __init__(self, path: Path, book: Book) -> None:
        self._path = path
        self._book = book
        self._seen: tuple[RuleSet, RelayKeys] | None = None
        self._problem = ""

    def renew(self, rules: RuleSet) -> RuleSet:
        """Give rules with the keys of now; as they are where nobody knows these."""
        try:
            return renewed(rules, read(self._path))
        except errors.ConfigError as error:
            self._tell(error)
            return rules

    @contextlib.asynccontextmanager
    async def keeping(self, editor: Editor) -> AsyncIterator[None]:
        """Look after them while the block runs."""
        task = asyncio.create_task(self._keep(editor), name="relay keys in the rules")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.wait([task])

    async def _keep(self, editor: Editor) -> None:
        while True:
            try:
                await self._look(editor)
                self._problem = ""
            except (errors.ConfigError, errors.RequestRefused) as error:
                self._tell(error)
            except Exception:  # a fault of ours must not end it
                _log.exception("the relay's keys in the rules could not be looked at")
            await asyncio.sleep(limits_relay.RELAY_KEYS_LOOK_S)

    async def _look(self, editor: Editor) -> None:
        rules, told = self._book.current(), read(self._path)
        if self._seen is not None and self._seen[0] is rules and self._seen[1] == told:
            return
        head = self._book.head
        if renewed(rules, told) is not rules and head is not None:
            # The editor puts the keys of now into whatever it is given.
            author = Author(PLATFORM, _WHY)
            await editor.publish(dispatch_rules.encode(rules), author, expected=head.version, force=True)
            return
        self._seen = (rules, told)

    def _tell(self, error: errors.StormlineError) -> None:
        if str(error) != self._problem:
            self._problem = str(error)
            _log.warning("the relay's keys in the rules stay as they are for now: %s", error)
