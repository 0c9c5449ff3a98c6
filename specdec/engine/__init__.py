"""Everything that needs torch: the models, their caches, the decoding loop and its clock."""
