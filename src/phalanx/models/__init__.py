"""The models: single-device modules built from the catalog's tables, with timm's names."""
