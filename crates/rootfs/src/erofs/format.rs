//! On-disk structures, little endian (Linux `fs/erofs/erofs_fs.h`).

pub use crate::chunk_table::{BLOCK_SIZE, MAX_CHUNK_BITS, MAX_CHUNKS};

/// Offset of the superblock in the image, bytes.
pub const SUPERBLOCK_OFFSET: u64 = 1024;
/// Bytes of an extended inode.
pub const INODE_SIZE: u64 = 64;
/// Unit in which inode numbers address the image, bytes.
pub const SLOT_SIZE: u64 = 32;
/// Bytes of a directory entry without its name.
pub const DIRENT_SIZE: usize = 12;
/// Longest tail that fits into one block with an inode without attributes, bytes.
pub const MAX_TAIL_INLINE: u64 = BLOCK_SIZE - INODE_SIZE;

/// Magic number at the beginning of a superblock.
pub const MAGIC: u32 = 0xe0f5_e1e2;
/// Feature: the superblock has a checksum.
pub const COMPAT_CHECKSUM: u32 = 1;
/// Feature: inode times are modification times.
const COMPAT_MTIME: u32 = 2;
/// Feature: some files have a chunk table.
pub const INCOMPAT_CHUNKED_FILE: u32 = 4;
/// Bytes of a superblock.
pub const SUPERBLOCK_SIZE: u64 = 128;
/// Volume name in the superblock; it identifies Jiffy as the writer.
pub const VOLUME_NAME: &[u8; 16] = b"jiffy\0\0\0\0\0\0\0\0\0\0\0";
/// The root's inode follows the superblock. A child image can then replace the root in place: its
/// number has only 16 bits, so it can't be behind a large parent.
pub const ROOT_OFFSET: u64 = SUPERBLOCK_OFFSET + SUPERBLOCK_SIZE;
/// Block address of a chunk that is a hole.
pub const HOLE: u32 = u32::MAX;

/// Bytes of the header before an inode's first attribute.
pub const XATTR_HEADER_SIZE: usize = 12;
/// Bytes of an attribute without its name and value; also the alignment of attributes.
pub const XATTR_ENTRY_SIZE: usize = 4;

/// Data layout of an inode.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Layout {
    /// All data is in blocks.
    Plain = 0,
    /// Whole blocks, and a tail right behind the inode.
    Inline = 2,
    /// A chunk table right behind the inode.
    Chunks = 4,
}

/// Fields of an extended inode.
#[derive(Debug, Clone, Copy)]
pub struct Inode {
    pub layout: Layout,
    /// `i_xattr_icount`.
    pub xattr_count: u16,
    /// Type and permissions.
    pub mode: u16,
    pub size: u64,
    /// First block, device number, or chunk format.
    pub union: u32,
    pub number: u32,
    pub uid: u32,
    pub gid: u32,
    pub mtime: u64,
    pub links: u32,
}

impl Inode {
    /// Encodes a `struct erofs_inode_extended`.
    pub fn to_bytes(self) -> [u8; INODE_SIZE as usize] {
        let mut bytes = [0; INODE_SIZE as usize];
        let mut out = FieldWriter(&mut bytes, 0);
        out.u16(1 | (self.layout as u16) << 1);
        out.u16(self.xattr_count);
        out.u16(self.mode);
        out.u16(0);
        out.u64(self.size);
        out.u32(self.union);
        out.u32(self.number);
        out.u32(self.uid);
        out.u32(self.gid);
        out.u64(self.mtime);
        out.u32(0);
        out.u32(self.links);
        bytes
    }
}

/// Encodes a `struct erofs_super_block`, with its checksum 0.
pub fn superblock(inodes: u64, blocks: u32, chunked: bool) -> Vec<u8> {
    let mut bytes = vec![0; SUPERBLOCK_SIZE as usize];
    let mut out = FieldWriter(&mut bytes, 0);
    out.u32(MAGIC);
    out.u32(0);
    out.u32(COMPAT_CHECKSUM | COMPAT_MTIME);
    out.u8(BLOCK_SIZE.trailing_zeros() as u8);
    out.u8(0);
    out.u16((ROOT_OFFSET / SLOT_SIZE) as u16);
    out.u64(inodes);
    out.u64(0); // build time: the same input gives the same image
    out.u32(0);
    out.u32(blocks);
    out.u32(0); // inodes are counted from the beginning of the image
    out.u32(0);
    out.bytes(&[0; 16]); // uuid
    out.bytes(VOLUME_NAME);
    out.u32(if chunked { INCOMPAT_CHUNKED_FILE } else { 0 });
    bytes
}

/// Checksum over the superblock and the rest of its block; the checksum field must be 0.
pub fn checksum(from_superblock: &[u8]) -> u32 {
    // The kernel's crc32c starts from all ones and isn't inverted at the end; the crate's is.
    !crc_fast::crc32_iscsi(from_superblock)
}

/// Offset of the checksum in the superblock, bytes.
pub const CHECKSUM_AT: usize = 4;

/// Encodes a directory entry without its name.
pub fn dirent(nid: u64, name_offset: u16, file_type: u8) -> [u8; DIRENT_SIZE] {
    let mut bytes = [0; DIRENT_SIZE];
    let mut out = FieldWriter(&mut bytes, 0);
    out.u64(nid);
    out.u16(name_offset);
    out.u8(file_type);
    bytes
}

/// Encodes a device number as Linux does (`new_encode_dev`).
pub fn device_number(major: u32, minor: u32) -> u32 {
    (minor & 0xff) | (major << 8) | ((minor & !0xff) << 12)
}

/// Decodes [`device_number`]: major and minor.
pub fn device_of(number: u32) -> (u32, u32) {
    (
        (number >> 8) & 0xfff,
        (number & 0xff) | ((number >> 12) & !0xff),
    )
}

/// Splits an attribute's name into its prefix index and the rest. `None` if EROFS can't store its
/// namespace.
pub fn xattr_index(name: &[u8]) -> Option<(u8, &[u8])> {
    const PREFIXES: [(u8, &[u8]); 3] = [(1, b"user."), (4, b"trusted."), (6, b"security.")];
    match name {
        b"system.posix_acl_access" => Some((2, b"")),
        b"system.posix_acl_default" => Some((3, b"")),
        _ => PREFIXES.iter().find_map(|(index, prefix)| {
            let rest = name.strip_prefix(*prefix)?;
            (!rest.is_empty()).then_some((*index, rest))
        }),
    }
}

/// Joins an attribute's name from its prefix index and the rest; the inverse of [`xattr_index`].
pub fn xattr_name(index: u8, rest: &[u8]) -> Option<Vec<u8>> {
    let prefix: &[u8] = match (index, rest.is_empty()) {
        (1, false) => b"user.",
        (2, true) => b"system.posix_acl_access",
        (3, true) => b"system.posix_acl_default",
        (4, false) => b"trusted.",
        (6, false) => b"security.",
        _ => return None,
    };
    Some([prefix, rest].concat())
}

/// Encodes the attributes that follow an inode; empty if there are none.
pub fn xattr_body<'a>(xattrs: impl Iterator<Item = (&'a Vec<u8>, &'a Vec<u8>)>) -> Vec<u8> {
    let mut body = Vec::new();
    for (name, value) in xattrs {
        let Some((index, rest)) = xattr_index(name) else {
            continue;
        };
        if body.is_empty() {
            body.resize(XATTR_HEADER_SIZE, 0);
        }
        body.push(rest.len() as u8);
        body.push(index);
        body.extend_from_slice(&(value.len() as u16).to_le_bytes());
        body.extend_from_slice(rest);
        body.extend_from_slice(value);
        body.resize(body.len().next_multiple_of(XATTR_ENTRY_SIZE), 0);
    }
    body
}

/// `i_xattr_icount` for a body of [`xattr_body`].
pub fn xattr_count(body_len: usize) -> u16 {
    match body_len.checked_sub(XATTR_HEADER_SIZE) {
        Some(entries) => (entries / XATTR_ENTRY_SIZE + 1) as u16,
        None => 0,
    }
}

/// Writes fields one after the other.
struct FieldWriter<'a>(&'a mut [u8], usize);

impl FieldWriter<'_> {
    fn bytes(&mut self, bytes: &[u8]) {
        self.0[self.1..self.1 + bytes.len()].copy_from_slice(bytes);
        self.1 += bytes.len();
    }
    fn u8(&mut self, value: u8) {
        self.bytes(&[value]);
    }
    fn u16(&mut self, value: u16) {
        self.bytes(&value.to_le_bytes());
    }
    fn u32(&mut self, value: u32) {
        self.bytes(&value.to_le_bytes());
    }
    fn u64(&mut self, value: u64) {
        self.bytes(&value.to_le_bytes());
    }
}
