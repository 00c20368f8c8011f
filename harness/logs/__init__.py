"""What a run writes while it goes on, by numbers of the training loop; nothing here knows a formula."""
