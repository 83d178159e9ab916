//! The protocol between the virtio-fs device of a VMM and `jiffy-files`, which serves a folder.
//!
//! The two ends are a pair of sockets (`AF_UNIX`, `SOCK_SEQPACKET`). One message is one FUSE
//! request or its answer, without the virtqueue (Virtio 1.3 §5.11; `linux/fuse.h`):
//!
//! * request: `fuse_in_header`, arguments, data. The header's `len` is the message's length.
//! * answer: `fuse_out_header`, payload. The header's `unique` is that of the request; the VMM
//!   chooses it, so that it differs from those of all requests without an answer.
//!
//! `jiffy-files` also takes a `SOCK_STREAM`, which has no other boundaries of messages: each begins
//! with its length (`len` of both headers) and the next follows at once. A length that no message
//! can have ends the connection. The machine's agent uses it, with `/dev/fuse` in place of a device.
//!
//! Answers come in any order. `FORGET`, `BATCH_FORGET` and `INTERRUPT` have no answer, and neither
//! has a message without a complete header. All others have exactly one, also if they are
//! malformed. If the VMM closes its end, the server exits with status 0.
//!
//! Two requests are the VMM's own: [`SAVE`] and [`RESTORE`] move what the server knows of the guest's
//! session between servers. Their `unique` is [`OWN`], which no request of a guest has. There is one
//! at a time, and no request of the guest without an answer meanwhile.
//!
//! * `SAVE`: offset u64, number of messages sent before this one u64. The answer is the session's
//!   length u64, and its bytes from that offset on, at most [`DATA_MAX`]. With offset 0 the server
//!   saves it, once it has executed as many messages; `EBUSY` if that takes too long, `EFBIG` if the
//!   session has more than [`SESSION_MAX`] bytes.
//! * `RESTORE`: the session's length u64, offset u64, bytes, in order. The last one restores it, in
//!   place of what the server knew; `EPROTONOSUPPORT` if a later release saved it, `EINVAL` if it is
//!   damaged.
//!
//! The server does not negotiate `FUSE_MAX_PAGES`: no request has more than [`DATA_MAX`] bytes of
//! data, and none asks for more.

/// The arguments of `jiffy-files`, which inherits the socket as descriptor 3 and the folder as 4.
/// With `squash` it serves all requests as its own user, because only root can act as others.
pub fn arguments(read_only: bool, squash: bool) -> impl Iterator<Item = &'static str> {
    let always = ["--socket-fd", "3", "--folder-fd", "4"];
    let read_only = read_only.then_some("--read-only");
    let squash = squash.then_some("--squash");
    always.into_iter().chain(read_only).chain(squash)
}

/// Most bytes of data that one request writes or reads: 32 pages, the default of FUSE.
pub const DATA_MAX: usize = 128 * 1024;
/// Most bytes of a message: data, and headers and names before it.
pub const MESSAGE_MAX: usize = DATA_MAX + 4096;
/// `unique` of requests of the VMM itself.
pub const OWN: u64 = 0;
/// `opcode` of the request for the session.
pub const SAVE: u32 = 0x4a46_0001;
/// `opcode` of the request to continue a session.
pub const RESTORE: u32 = 0x4a46_0002;
/// Most bytes of a session.
pub const SESSION_MAX: usize = 32 << 20;
