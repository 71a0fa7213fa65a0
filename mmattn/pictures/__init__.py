"""Pictures of what a model does, drawn with Pillow alone."""

from mmattn.pictures.alignment import alignment_sheet
from mmattn.pictures.photos import attention_sheet, caption_sheet, heat_map

__all__ = ["alignment_sheet", "attention_sheet", "caption_sheet", "heat_map"]
