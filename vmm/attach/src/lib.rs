//! Guests that somebody else started: QEMU's, with or without libvirt.
