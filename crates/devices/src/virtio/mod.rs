//! Virtio devices (Virtio 1.3) and what they share.

pub mod device;
