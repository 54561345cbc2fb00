"""Write the dashboards: `python -m grafana`, in the root of the repository.

grafana/dashboards/UID.json                 to import, or to provision as a folder
deploy/kubernetes/dashboards.yaml           the same as ConfigMaps, for Grafana's sidecar
"""

from __future__ import annotations

import sys

from .files import FILES


def main() -> int:
    for path, text in FILES.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
