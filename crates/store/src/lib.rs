//! Images of fixed-size chunks: RAM and disks, written once, read at random.
//!
//! For each chunk, an image says where its bytes are: nowhere (zero), in the file (raw or
//! compressed), in a parent image, or in a backing file. `docs/image-format.md` specifies the file.
//!
//! * [`format`](mod@format): the bytes of an image that are not chunks.
//! * [`codec`]: compresses and decompresses chunks.
//! * [`source`]: the contents of a new image: files, layers of files.
//! * [`writer`]: [`write_image`] writes an image on all cores, as one stream.
//! * [`outline`]: header, footer and manifest of an image, without its chunks and parents.
//! * [`reader`]: [`ImageReader`], which reads any chunk at any time, from any thread.
//! * [`partial`]: images of which parts are missing, and the origins of those parts.
//! * [`disk_cache`]: a disk's bytes in a file that is filled chunk by chunk on demand.
//! * [`presence`]: the map of the parts of a file that are present; `sparse`: a file with such a
//!   map, for the two above.
//! * [`runs`]: joins ranges that are close together, so that they are read at once.
//! * [`backing`]: a file that images refer to instead of storing the same bytes.
//! * [`bounded`]: keeps caches within a limit.
//! * [`raw`]: [`write_raw`], which writes a sparse file that a VMM can map.
//! * [`recording`]: which chunks a restore touched, in order.
//! * [`optimise`](mod@optimise): rewrites an image with its working set first.
//! * [`inspect`]: figures, a map and a picture of an image.
//! * [`stop`]: cancellation of reads.
//! * [`temporary`]: files that appear under their name only when they are complete.

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
pub use partial::{Bytes, Origin, OriginError, PeerFolder};
pub use raw::write_raw;
pub use reader::ImageReader;
pub use recording::Recording;
pub use source::{ChunkSource, LayeredFile};
pub use stop::Stop;
pub use writer::{WriteOptions, Written, write_image};
