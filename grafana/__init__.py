"""The Grafana dashboards as code: `python -m grafana` writes what is committed in `dashboards/`."""
