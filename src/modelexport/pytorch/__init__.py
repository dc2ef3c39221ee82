"""What knows torch: models loaded, their inputs, their module tree, their traces."""
