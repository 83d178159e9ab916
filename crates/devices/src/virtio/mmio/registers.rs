//! Register offsets of a virtio-mmio window (Virtio 1.3 §4.2.2) and status bits (§2.1).

/// Bytes of a device's window: a page, so that no two devices share one.
pub const WINDOW_BYTES: u64 = 0x1000;

/// MagicValue: "virt", little endian.
pub const MAGIC: u32 = 0x7472_6976;
/// Version: the modern interface.
pub const VERSION: u32 = 2;
/// VendorID: "JIFY", little endian; drivers ignore it.
pub const VENDOR: u32 = u32::from_le_bytes(*b"JIFY");

pub(super) const MAGIC_VALUE: u64 = 0x00;
pub(super) const VERSION_NUMBER: u64 = 0x04;
pub(super) const DEVICE_ID: u64 = 0x08;
pub(super) const VENDOR_ID: u64 = 0x0c;
pub(super) const DEVICE_FEATURES: u64 = 0x10;
pub(super) const DEVICE_FEATURES_SELECT: u64 = 0x14;
pub(super) const DRIVER_FEATURES: u64 = 0x20;
pub(super) const DRIVER_FEATURES_SELECT: u64 = 0x24;
pub(super) const QUEUE_SELECT: u64 = 0x30;
pub(super) const QUEUE_SIZE_MAX: u64 = 0x34;
pub(super) const QUEUE_SIZE: u64 = 0x38;
pub(super) const QUEUE_READY: u64 = 0x44;
/// Offset of QueueNotify: the driver writes a queue's index there. All ioeventfds have its address.
pub const QUEUE_NOTIFY: u64 = 0x50;
pub(super) const INTERRUPT_STATUS: u64 = 0x60;
pub(super) const INTERRUPT_ACK: u64 = 0x64;
pub(super) const STATUS: u64 = 0x70;
pub(super) const QUEUE_DESC_LOW: u64 = 0x80;
pub(super) const QUEUE_DESC_HIGH: u64 = 0x84;
pub(super) const QUEUE_DRIVER_LOW: u64 = 0x90;
pub(super) const QUEUE_DRIVER_HIGH: u64 = 0x94;
pub(super) const QUEUE_DEVICE_LOW: u64 = 0xa0;
pub(super) const QUEUE_DEVICE_HIGH: u64 = 0xa4;
pub(super) const SHM_LENGTH_LOW: u64 = 0xb0;
pub(super) const SHM_LENGTH_HIGH: u64 = 0xb4;
pub(super) const SHM_BASE_LOW: u64 = 0xb8;
pub(super) const SHM_BASE_HIGH: u64 = 0xbc;
pub(super) const CONFIG_GENERATION: u64 = 0xfc;
pub(super) const CONFIG: u64 = 0x100;

/// Device status bits.
pub mod status {
    /// The guest has seen the device.
    pub const ACKNOWLEDGE: u32 = 1;
    /// The guest has a driver for it.
    pub const DRIVER: u32 = 2;
    /// The driver is ready.
    pub const DRIVER_OK: u32 = 4;
    /// Features are negotiated.
    pub const FEATURES_OK: u32 = 8;
    /// Set by the device: only a reset helps.
    pub const NEEDS_RESET: u32 = 64;
    /// The driver has given up.
    pub const FAILED: u32 = 128;
}

/// Feature bit 32, the modern interface; it is offered and required.
pub const FEATURE_VERSION_1: u64 = 1 << 32;
