"""The track: how many steps each optimizer needs to bring one small language model to one validation loss."""
