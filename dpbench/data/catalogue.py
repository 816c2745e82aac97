"""Every data set that can be listed and checked. Another kind of data adds its sources here."""

from __future__ import annotations

from dpbench.data.image_sources import IMAGES
from dpbench.data.sources import Source
from dpbench.data.table_sources import TABLES
from dpbench.data.text_sources import TEXTS

SOURCES: dict[str, Source] = {**IMAGES, **TABLES, **TEXTS}
