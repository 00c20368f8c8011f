"""The loss doctor: numeric tests for the loss function, masks and advantages of any trainer."""
