"""Keys of the HTTP APIs: drawn at first start, kept in the state folder."""

from stormline.assembly import layout
from stormline.core import errors, ids
from stormline.core.clock import Rng


def ensure_keys(place: layout.Layout, *, rng: Rng) -> layout.Keys:
    """Read the keys, or draw them where there are none.

    Raises:
        PlatformError: the file is damaged, open to other users, or cannot be written.
    """
    path = place.keys
    keys = layout.read(path, layout.Keys)
    if keys is None:
        keys = layout.Keys(admin=ids.new_id(rng), business=ids.new_id(rng))
        layout.write(path, keys)
        return keys
    if path.stat().st_mode & 0o077:
        raise errors.PlatformError(f"state folder: {path} is open to other users; chmod 600 it, or remove it")
    return keys
