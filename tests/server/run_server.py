"""`python -m tests.server.run_server '{"model_path": ..., ...}'`: a server as a test wants it.

The keys `engine` and `app` go to `serve`, all others to `ServerArgs`. The address is printed when
requests are taken. Errors end as those of the command line do.
"""

from __future__ import annotations

import json
import sys

from minisgl.config import DistributedInfo, ServerArgs
from minisgl.params import MinisglError
from minisgl.server.launch import serve

SIMULATED = {"engine": "tests.server.simulated:make_engine"}
STUB = {"app": "tests.server.stub_app:create_app"}


def main() -> int:
    fields = json.loads(sys.argv[1])
    options = {**STUB, **{key: fields.pop(key) for key in ("engine", "app") if key in fields}}
    fields["tp_info"] = DistributedInfo(0, fields.pop("tp_size", 1))
    try:
        args = ServerArgs(**fields)
        return serve(args, on_ready=lambda name, url: print(url, flush=True), **options)
    except MinisglError as error:
        print("minisgl:", error, file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
