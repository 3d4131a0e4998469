"""Docker sandboxes: the protocol, containers, images, leases."""
