"""Ranks: how they start, meet, agree, and exchange what they computed."""
