//! Images of fixed-size chunks: RAM and disks, written once, read at random.
//!
//! An image lists, chunk by chunk, where the bytes are: nowhere (zero), in the
//! file as they are, compressed, or in a parent image. `docs/image-format.md`
//! specifies the file.
//!
//! * [`format`]: the bytes of an image that are not chunks.
//! * [`codec`]: how a chunk is compressed and brought back.
//! * [`source`]: what an image is made of: files, layers of files.
//! * [`writer`]: [`write_image`], on all cores, as one stream.
//! * [`outline`]: what an image says of itself, without its chunks and parents.
//! * [`reader`]: [`ImageReader`], any chunk at any time, from any thread.
//! * [`partial`]: images that are not all here, and who has the rest.
//! * [`disk_cache`]: a disk's bytes in a file, chunk by chunk as they are needed.
//! * [`presence`]: the map of what is there of a file; `sparse`: a file with one, and which
//!   parts of it are being filled: what the two above have in common.
//! * [`runs`]: places that are near one another, read together.
//! * [`backing`]: a file of which images name parts instead of storing them.
//! * [`bounded`]: caches that are kept small.
//! * [`raw`]: [`write_raw`], a sparse file a VMM can map.
//! * [`recording`]: which chunks a restore touched, in order.
//! * [`optimise`]: an image written anew with its working set first.
//! * [`inspect`]: what an image consists of: figures, a map, a picture.
//! * [`stop`]: whether something is still wanted.
//! * [`temporary`]: files that appear whole under their name, or not at all.

pub mod backing;
pub mod bounded;
pub mod codec;
pub mod disk_cache;
pub mod error;
pub mod format;
pub mod inspect;
pub mod optimise;
pub mod outline;
pub mod partial;
pub mod presence;
pub mod raw;
pub mod reader;
pub mod recording;
pub mod runs;
#[cfg(test)]
mod samples;
pub mod source;
mod sparse;
pub mod stop;
pub mod temporary;
#[cfg(any(test, feature = "testing"))]
pub mod testing;
pub mod writer;

pub use backing::Backing;
pub use codec::{Codec, Decoder};
pub use disk_cache::DiskCache;
pub use error::{BackingFault, Fault, ImageError, WriteError};
pub use format::{BackingRef, ImageId, Kind, ParentRef};
pub use optimise::optimise;
pub use outline::Outline;
pub use partial::{Origin, OriginError, PeerFolder};
pub use raw::write_raw;
pub use reader::ImageReader;
pub use recording::Recording;
pub use source::{ChunkSource, LayeredFile};
pub use stop::Stop;
pub use writer::{WriteOptions, Written, write_image};
