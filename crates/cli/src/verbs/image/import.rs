//! `jiffy image import`

use super::{default_registry, show_image};
use crate::args::image::Import;
use crate::client::{BodySender, Client, encoded};
use crate::failure::{Failure, Outcome, Result, report};
use hyper::Method;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use jiffy_wire::api;
use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{self, Cursor, Read, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use tar::{Builder, EntryType, Header};

/// `jiffy image import`
///
/// # Errors
///
/// If the source can't be read, or the node refuses it.
pub async fn import(client: &Client, wanted: Import) -> Result<Outcome> {
    let source = Source::open(wanted.source.clone())?;
    let mut query = format!("from={}", encoded(&wanted.source.display().to_string()));
    if let Some(kind) = source.kind() {
        query.push_str(&format!("&kind={kind}"));
    }
    if let Some(registry) = default_registry() {
        query.push_str(&format!("&registry={}", encoded(&registry)));
    }
    if let Some(reference) = &wanted.reference {
        query.push_str(&format!("&reference={}", encoded(reference)));
    }
    let length = source.length();
    let write = move |out: &mut dyn Write| source.write_to(out);
    let image = upload(client, &wanted.name, &query, length, write).await?;
    show_image(&image, wanted.format)
}

/// Uploads what `write` writes as an image, with a progress bar; `length` is the number of bytes if
/// it is known.
///
/// # Errors
///
/// If `write` fails, or the node refuses the image.
pub async fn upload(
    client: &Client,
    name: &str,
    query: &str,
    length: Option<u64>,
    write: impl FnOnce(&mut dyn Write) -> io::Result<()> + Send + 'static,
) -> Result<api::Image> {
    let bar = progress(length);
    let (sender, body) = BodySender::new();
    let mut out = Counted {
        inner: sender,
        bar: bar.clone(),
    };
    // Reading and packing block, so they have a thread of their own.
    let packing = std::thread::spawn(move || {
        let result = write(&mut out);
        out.inner.finish(result);
    });
    let path = format!("/v1/images/{}?{query}", encoded(name));
    let result = client.upload::<api::Image>(Method::POST, &path, body).await;
    bar.finish_and_clear();
    if result.is_ok() {
        let _ = packing.join();
    }
    result
}

/// A progress bar for a file of known size, otherwise a counter; nothing if stderr is not a
/// terminal.
fn progress(length: Option<u64>) -> ProgressBar {
    let (bar, template) = match length {
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

/// The source of an image.
enum Source {
    /// A root file system.
    Folder(PathBuf),
    /// An OCI layout.
    Layout(PathBuf),
    /// A file whose format the node detects, with its size if known.
    File(Box<dyn Read + Send>, Option<u64>),
}

impl Source {
    fn open(path: PathBuf) -> Result<Source> {
        let failed = |error| Failure::io(format_args!("{} can't be read", path.display()), error);
        if path.as_os_str() == "-" {
            if crate::session::on_terminal() {
                return Err(Failure::new("stdin is a terminal, not a tar")
                    .hint("tar -C FOLDER -c . | jiffy image import NAME -"));
            }
            return Source::file(Box::new(io::stdin()), None, "stdin");
        }
        let facts = fs::metadata(&path).map_err(failed)?;
        if facts.is_dir() {
            // An unreadable folder is reported before the upload begins.
            fs::read_dir(&path).map_err(failed)?;
            let layout = path.join("oci-layout").is_file() && path.join("index.json").is_file();
            return Ok(match layout {
                true => Source::Layout(path),
                false => Source::Folder(path),
            });
        }
        let file = File::open(&path).map_err(failed)?;
        let length = facts.is_file().then_some(facts.len());
        Source::file(Box::new(file), length, &path.display().to_string())
    }

    fn file(mut file: Box<dyn Read + Send>, length: Option<u64>, shown: &str) -> Result<Source> {
        let mut first = Vec::new();
        file.by_ref()
            .take(1)
            .read_to_end(&mut first)
            .map_err(|error| Failure::io(format_args!("{shown} can't be read"), error))?;
        if first.is_empty() {
            return Err(Failure::new(format!("{shown} is empty")));
        }
        Ok(Source::File(
            Box::new(Cursor::new(first).chain(file)),
            length,
        ))
    }

    /// The kind for the request; the node detects the format of a file.
    fn kind(&self) -> Option<&'static str> {
        match self {
            Source::Folder(_) => Some("root"),
            Source::Layout(_) => Some("layout"),
            Source::File(..) => None,
        }
    }

    fn length(&self) -> Option<u64> {
        match self {
            Source::File(_, length) => *length,
            Source::Folder(_) | Source::Layout(_) => None,
        }
    }

    fn write_to(self, out: &mut dyn Write) -> io::Result<()> {
        match self {
            Source::Folder(folder) | Source::Layout(folder) => {
                pack(&folder, out, |note| report(&note, None))
            }
            Source::File(mut file, _) => io::copy(&mut file, out).map(|_| ()),
        }
    }
}

/// Writes a folder as a tar: modes, owners, times, links of both kinds. Entries that an image can't
/// contain or use are skipped, with a note.
fn pack(folder: &Path, out: &mut dyn Write, mut note: impl FnMut(String)) -> io::Result<()> {
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
    fn folders_are_classified_and_files_are_sent_unchanged() {
        let folder = tempfile::tempdir().unwrap();
        let kind = || Source::open(folder.path().to_owned()).unwrap().kind();
        assert_eq!(kind(), Some("root"));
        fs::write(folder.path().join("oci-layout"), b"{}").unwrap();
        assert_eq!(kind(), Some("root"), "an OCI layout also has index.json");
        fs::write(folder.path().join("index.json"), b"{}").unwrap();
        assert_eq!(kind(), Some("layout"));
        let gzip = b"\x1f\x8bpacked";
        let file = folder.path().join("a.tgz");
        fs::write(&file, gzip).unwrap();
        let source = Source::open(file.clone()).unwrap();
        assert_eq!((source.kind(), source.length()), (None, Some(8)));
        let mut out = Vec::new();
        source.write_to(&mut out).unwrap();
        assert_eq!(out, gzip);
        fs::write(&file, b"").unwrap();
        assert!(Source::open(file).err().unwrap().message.contains("empty"));
    }
}
