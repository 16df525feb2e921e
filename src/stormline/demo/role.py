"""The demo's processes: `python -m stormline.demo.role shop --state DIR`, started by `stormline up --demo`."""

import contextlib
import sys

from stormline.assembly import role
from stormline.core.values import Secret


async def _shop(context: role.Context) -> None:
    from stormline.demo import shop
    from stormline.engine.nats import EngineConfig

    settings = context.settings
    config = shop.ShopConfig(
        host=settings.host,
        port=settings.ports.shop,
        biz=EngineConfig(
            url=settings.nats.url,
            user=settings.nats.biz_user,
            password=Secret(settings.nats.biz_password),
            name="demo shop",
        ),
    )
    await shop.run(
        config,
        started=lambda address: context.started({"shop": address}),
        stop=context.stop,
    )


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        sys.exit(role.main(sys.argv[1:], {"shop": _shop}))
