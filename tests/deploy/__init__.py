"""What users install, as built: packages, unit, image, manifests.  Run by `make deployable`, not by `make test`."""
