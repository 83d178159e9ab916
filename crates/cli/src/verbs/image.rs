//! `jiffy image`

use super::Context;
use super::context::{show, show_json};
use super::vms::each;
use crate::args::{Image, JsonFormat, ListFormat};
use crate::client::{BodySender, Client, encoded};
use crate::failure::{Failure, Outcome, Result, report};
use crate::render::{Table, age, now, size};
use flate2::read::MultiGzDecoder;
use hyper::Method;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use jiffy_wire::api;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Cursor, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tar::{Builder, EntryType, Header};

/// `jiffy image`
pub async fn image(context: &Context, image: Image) -> Result<Outcome> {
    match image {
        Image::Import {
            name,
            source,
            format,
        } => import(&context.client()?, &name, source, format).await,
        Image::Ls { format } => {
            let images: Vec<api::Image> = context.client()?.get("/v1/images").await?;
            list(&images, format)?;
            Ok(Outcome::Done)
        }
        Image::Rm { names } => {
            let client = context.client()?;
            each(&names, async |name| {
                client
                    .delete(&format!("/v1/images/{}", encoded(name)))
                    .await?;
                show(&format!("{name}\n"))
            })
            .await
        }
    }
}

fn list(images: &[api::Image], format: ListFormat) -> Result<()> {
    if format == ListFormat::Json {
        return show_json(&images);
    }
    let now = now();
    let mut table = Table::new(["NAME", "DIGEST", "SIZE", "ENTRIES", "CREATED"]);
    for image in images {
        table.row([
            image.name.clone(),
            image.digest.chars().take(12).collect(),
            size(image.size),
            image.entries.to_string(),
            format!("{} ago", age(image.created, now)),
        ]);
    }
    show(&table.to_string())
}

async fn import(
    client: &Client,
    name: &str,
    source: PathBuf,
    format: Option<JsonFormat>,
) -> Result<Outcome> {
    let source = Source::open(source)?;
    let bar = progress(&source);
    let (sender, body) = BodySender::new();
    let counted = bar.clone();
    // Reading and packing block, so they have a thread of their own.
    let packing = std::thread::spawn(move || {
        let mut out = bar_writer(sender, counted);
        let result = source.write_to(&mut out);
        out.inner.finish(result);
    });
    let path = format!("/v1/images/{}", encoded(name));
    let result = client.upload::<api::Image>(Method::POST, &path, body).await;
    bar.finish_and_clear();
    if result.is_ok() {
        let _ = packing.join();
    }
    let image = result?;
    match format {
        Some(JsonFormat::Json) => show_json(&image)?,
        None => show(&format!("{}\n", image.name))?,
    }
    Ok(Outcome::Done)
}

/// A bar for a file, whose size is known, and a count for the rest; nothing
/// where stderr is no terminal.
fn progress(source: &Source) -> ProgressBar {
    let (bar, template) = match source.length() {
        Some(length) => (
            ProgressBar::new(length),
            "  importing {bar:30} {bytes} of {total_bytes}",
        ),
        None => (ProgressBar::new_spinner(), "  importing {spinner} {bytes}"),
    };
    bar.set_draw_target(ProgressDrawTarget::stderr());
    if let Ok(style) = ProgressStyle::with_template(template) {
        bar.set_style(style);
    }
    bar
}

struct Counted<W> {
    inner: W,
    bar: ProgressBar,
}

fn bar_writer<W: Write>(inner: W, bar: ProgressBar) -> Counted<W> {
    Counted { inner, bar }
}

impl<W: Write> Write for Counted<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let count = self.inner.write(bytes)?;
        self.bar.inc(count as u64);
        Ok(count)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

/// What an image is made from.
enum Source {
    Folder(PathBuf),
    /// A tar, perhaps gzipped, with its size if that is what will be sent.
    Tar(Box<dyn Read + Send>, Option<u64>),
}

/// Longest beginning that tells how a file is packed.
const MAGIC: u64 = 6;

impl Source {
    fn open(path: PathBuf) -> Result<Source> {
        let failed = |error| Failure::io(format_args!("{} can't be read", path.display()), error);
        if path.as_os_str() == "-" {
            if crate::session::on_terminal() {
                return Err(Failure::new("stdin is a terminal, and no tar")
                    .hint("tar -C FOLDER -c . | jiffy image import NAME -"));
            }
            return Source::tar(Box::new(io::stdin()), None, "stdin");
        }
        let facts = fs::metadata(&path).map_err(failed)?;
        if facts.is_dir() {
            // Whether it can be listed is better known before the upload.
            fs::read_dir(&path).map_err(failed)?;
            return Ok(Source::Folder(path));
        }
        let file = File::open(&path).map_err(failed)?;
        let length = facts.is_file().then_some(facts.len());
        Source::tar(Box::new(file), length, &path.display().to_string())
    }

    fn tar(mut file: Box<dyn Read + Send>, length: Option<u64>, shown: &str) -> Result<Source> {
        let mut begin = Vec::new();
        file.by_ref()
            .take(MAGIC)
            .read_to_end(&mut begin)
            .map_err(|error| Failure::io(format_args!("{shown} can't be read"), error))?;
        let unpack = |tool: &str| {
            Err(Failure::new(format!(
                "{shown} is packed with {tool}, which jiffy does not unpack"
            ))
            .hint(format!("{tool} -dc FILE | jiffy image import NAME -")))
        };
        let whole = Cursor::new(begin.clone()).chain(file);
        match begin.as_slice() {
            [] => Err(Failure::new(format!("{shown} is empty, and no tar"))),
            [0x1f, 0x8b, ..] => Ok(Source::Tar(Box::new(MultiGzDecoder::new(whole)), None)),
            [0xfd, b'7', b'z', b'X', b'Z', 0] => unpack("xz"),
            [0x28, 0xb5, 0x2f, 0xfd, ..] => unpack("zstd"),
            [b'B', b'Z', b'h', ..] => unpack("bzip2"),
            _ => Ok(Source::Tar(Box::new(whole), length)),
        }
    }

    fn length(&self) -> Option<u64> {
        match self {
            Source::Tar(_, length) => *length,
            Source::Folder(_) => None,
        }
    }

    fn write_to(self, out: &mut impl Write) -> io::Result<()> {
        match self {
            Source::Folder(folder) => pack(&folder, out, |note| report(&note, None)),
            Source::Tar(mut tar, _) => io::copy(&mut tar, out).map(|_| ()),
        }
    }
}

/// Writes a folder as a tar: modes, owners, times, links of both kinds. What
/// an image can't hold or use is left out with a note.
fn pack(folder: &Path, out: &mut impl Write, mut note: impl FnMut(String)) -> io::Result<()> {
    let mut tar = Builder::new(out);
    let mut seen: HashMap<(u64, u64), PathBuf> = HashMap::new();
    let mut waiting = vec![(folder.to_owned(), PathBuf::new())];
    while let Some((path, inside)) = waiting.pop() {
        let failed = |error: io::Error| {
            let why = crate::failure::reason(&error);
            io::Error::other(format!("{} can't be read: {why}", path.display()))
        };
        let facts = match inside.as_os_str().is_empty() {
            true => fs::metadata(&path),
            false => fs::symlink_metadata(&path),
        }
        .map_err(failed)?;
        let mut header = Header::new_gnu();
        header.set_metadata(&facts);
        header.set_size(0);
        let kind = facts.file_type();
        if kind.is_dir() {
            let mut names: Vec<_> = fs::read_dir(&path)
                .and_then(|entries| entries.map(|entry| Ok(entry?.file_name())).collect())
                .map_err(failed)?;
            names.sort_by(|a: &std::ffi::OsString, b| b.cmp(a));
            waiting.extend(
                names
                    .into_iter()
                    .map(|name| (path.join(&name), inside.join(&name))),
            );
            header.set_entry_type(EntryType::Directory);
            let mut name = inside.into_os_string();
            name.push(if name.is_empty() { "./" } else { "/" });
            tar.append_data(&mut header, &name, io::empty())?;
        } else if kind.is_symlink() {
            let target = fs::read_link(&path).map_err(failed)?;
            header.set_entry_type(EntryType::Symlink);
            tar.append_link(&mut header, &inside, target)?;
        } else if kind.is_file() {
            if facts.nlink() > 1 {
                if let Some(first) = seen.get(&(facts.dev(), facts.ino())) {
                    header.set_entry_type(EntryType::Link);
                    tar.append_link(&mut header, &inside, first)?;
                    continue;
                }
                seen.insert((facts.dev(), facts.ino()), inside.clone());
            }
            header.set_entry_type(EntryType::Regular);
            header.set_size(facts.len());
            let mut file = File::open(&path).map_err(failed)?.take(facts.len());
            tar.append_data(&mut header, &inside, &mut file)?;
            if file.limit() > 0 {
                return Err(io::Error::other(format!(
                    "{} became shorter while it was read",
                    path.display()
                )));
            }
        } else {
            note(format!(
                "left out {}: it is neither file, folder nor link",
                path.display()
            ));
        }
    }
    tar.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    fn source(bytes: &[u8]) -> Result<Source> {
        Source::tar(Box::new(Cursor::new(bytes.to_vec())), None, "x")
    }

    #[test]
    fn a_folder_keeps_modes_and_links_of_both_kinds() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::set_permissions(root, fs::Permissions::from_mode(0o700)).unwrap();
        fs::create_dir(root.join("bin")).unwrap();
        fs::write(root.join("bin/tool"), b"#!").unwrap();
        fs::set_permissions(root.join("bin/tool"), fs::Permissions::from_mode(0o4755)).unwrap();
        fs::hard_link(root.join("bin/tool"), root.join("bin/twin")).unwrap();
        symlink("/bin/tool", root.join("link")).unwrap();
        let long = "n".repeat(200);
        fs::write(root.join(&long), b"long").unwrap();
        rustix::fs::mkfifoat(rustix::fs::CWD, root.join("pipe"), 0o600.into()).unwrap();

        let (mut packed, mut notes) = (Vec::new(), Vec::new());
        pack(root, &mut packed, |note| notes.push(note)).unwrap();
        let mut archive = tar::Archive::new(&packed[..]);
        let entries: Vec<String> = archive
            .entries()
            .unwrap()
            .map(|entry| {
                let entry = entry.unwrap();
                format!(
                    "{:?} {:o} {}{}",
                    entry.header().entry_type(),
                    entry.header().mode().unwrap() & 0o7777,
                    entry.path().unwrap().display(),
                    match entry.link_name().unwrap() {
                        Some(target) => format!(" -> {}", target.display()),
                        None => String::new(),
                    }
                )
            })
            .collect();
        assert_eq!(entries[0], "Directory 700 ./");
        assert_eq!(entries[1], "Directory 755 bin/");
        assert_eq!(entries[2], "Regular 4755 bin/tool");
        assert_eq!(entries[3], "Link 4755 bin/twin -> bin/tool");
        assert_eq!(entries[4], "Symlink 777 link -> /bin/tool");
        assert_eq!(entries[5], format!("Regular 644 {long}"));
        assert_eq!(entries.len(), 6);
        assert_eq!(notes.len(), 1);
        assert!(notes[0].contains("pipe"));
    }

    #[test]
    fn gzip_is_unpacked_and_other_packers_are_named() {
        let mut gzip = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        gzip.write_all(b"contents").unwrap();
        let mut out = Vec::new();
        source(&gzip.finish().unwrap())
            .unwrap()
            .write_to(&mut out)
            .unwrap();
        assert_eq!(out, b"contents");
        let xz = source(b"\xfd7zXZ\0...").err().unwrap();
        assert!(xz.message.contains("xz"));
        assert!(xz.hint.unwrap().starts_with("xz -dc"));
        assert!(source(b"\x28\xb5\x2f\xfd...").is_err());
        assert!(source(b"").is_err());
        let mut plain = Vec::new();
        source(b"abc").unwrap().write_to(&mut plain).unwrap();
        assert_eq!(plain, b"abc");
    }
}
