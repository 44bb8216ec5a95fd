"""What runs on a device, one file per job and device. `torch_paged` is the attention that every other must equal."""
