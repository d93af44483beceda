"""URLs of object stores. They are written into files and logs, so one that holds a secret is refused before it is shown anywhere."""

import re

# user and password before the host; a secret key may hold slashes
_SECRET = re.compile(r"[^/:]*:/*([^/]*|[^/]*:(?!\d+/).*)@")
HOLDS_SECRETS = "holds credentials or options; give SCHEME://BUCKET/PREFIX and put credentials into the environment"


def holds_secrets(url: str) -> bool:
    """Whether a URL has a user and password, or anything behind ``?`` or ``#``, where tokens stand."""
    return bool(_SECRET.match(url)) or "?" in url or "#" in url
