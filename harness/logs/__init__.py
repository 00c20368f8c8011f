"""The files that a run writes, from numbers of the training loop; nothing here knows a formula."""
