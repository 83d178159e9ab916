//! All targets.

use crate::Target;

pub mod agent_frames;
pub mod api_requests;
pub mod balloon_queues;
pub mod block_queue;
pub mod boot_calls;
pub mod copy_from_vm;
pub mod cpu_profile;
pub mod disk_map;
pub mod entropy_queue;
pub mod ext4_superblock;
pub mod files_requests;
pub mod fs_queues;
pub mod fw_cfg;
pub mod guest_files;
pub mod image_archive;
pub mod image_config;
pub mod kernel_config;
pub mod kernel_image;
pub mod layer_tar;
pub mod memory_layout;
pub mod mmio_transport;
pub mod name_messages;
pub mod net_queues;
pub mod node_files;
pub mod pager_handshake;
pub mod ports;
pub mod process_messages;
pub mod process_streams;
pub mod proxy_requests;
pub mod registry_answers;
pub mod registry_manifest;
pub mod store_image;
pub mod vhost_disk;
pub mod vmm_state;
pub mod vsock_packets;

/// All of them.
pub const TARGETS: &[Target] = &[
    agent_frames::TARGET,
    api_requests::TARGET,
    balloon_queues::TARGET,
    block_queue::TARGET,
    boot_calls::TARGET,
    copy_from_vm::TARGET,
    cpu_profile::TARGET,
    disk_map::TARGET,
    entropy_queue::TARGET,
    ext4_superblock::TARGET,
    fs_queues::TARGET,
    files_requests::TARGET,
    fw_cfg::TARGET,
    guest_files::TARGET,
    image_archive::TARGET,
    image_config::TARGET,
    kernel_config::TARGET,
    kernel_image::TARGET,
    layer_tar::TARGET,
    memory_layout::TARGET,
    mmio_transport::TARGET,
    name_messages::TARGET,
    net_queues::TARGET,
    node_files::TARGET,
    pager_handshake::TARGET,
    ports::TARGET,
    process_messages::TARGET,
    process_streams::TARGET,
    proxy_requests::TARGET,
    registry_answers::TARGET,
    registry_manifest::TARGET,
    store_image::TARGET,
    vhost_disk::TARGET,
    vmm_state::TARGET,
    vsock_packets::TARGET,
];
