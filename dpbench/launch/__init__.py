"""Having runs carried out: in this process, or by one of Hydra's launchers, until each has ended."""
