//! Tests of images with several layers, in every source format.

mod common;

use common::{Compression, Layout, Tar, compress, digest, extract, sentence};
use jiffy_rootfs::{
    Choice, Digest, ImportError, Imported, Layer, Limits, Platform, Progress, Source, SourceKind,
    import,
};
use serde_json::json;
use std::fs;
use std::ops::ControlFlow;
use std::path::Path;

fn open(path: &Path) -> Result<Source, String> {
    let scratch = tempfile::tempdir().unwrap();
    Source::open(path, &Choice::new(scratch.path())).map_err(|error| sentence(&error))
}

/// Imports a source; checks that an error leaves nothing behind.
fn run(source: Source, out: &Path) -> Result<Imported, String> {
    import(source, out, &Limits::default(), &mut |_| {
        ControlFlow::Continue(())
    })
    .map_err(|error| {
        let folder = out.parent().unwrap();
        assert_eq!(fs::read_dir(folder).unwrap().count(), 0, "a file is left");
        sentence(&error)
    })
}

fn imported(path: &Path) -> Result<Imported, String> {
    let folder = tempfile::tempdir().unwrap();
    run(open(path)?, &folder.path().join("image"))
}

/// Imports layers as fetched blobs.
fn fetched(layers: &[Vec<u8>], how: Compression) -> Result<(Imported, tempfile::TempDir), String> {
    let folder = tempfile::tempdir().unwrap();
    let blobs = tempfile::tempdir().unwrap();
    let diff_ids: Vec<String> = layers.iter().map(|tar| digest(tar)).collect();
    let config = json!({
        "architecture": "amd64", "os": "linux", "config": {"Cmd": ["sh"]},
        "rootfs": {"type": "layers", "diff_ids": diff_ids},
    });
    let layers: Vec<Layer> = (0..)
        .zip(layers)
        .map(|(number, tar)| {
            let blob = compress(tar, how);
            let path = blobs.path().join(format!("{number}"));
            fs::write(&path, &blob).unwrap();
            Layer {
                path,
                digest: Some(Digest::of(&blob)),
                size: Some(blob.len() as u64),
                ..Layer::default()
            }
        })
        .collect();
    let choice = Choice::new(folder.path());
    let source = Source::layers(config.to_string().as_bytes(), &layers, &choice)
        .map_err(|error| sentence(&error))?;
    let imported = run(source, &folder.path().join("image"))?;
    Ok((imported, folder))
}

fn refusal(layers: &[Vec<u8>]) -> String {
    fetched(layers, Compression::Gzip).map(|_| ()).unwrap_err()
}

fn three_layers() -> Vec<Vec<u8>> {
    let hard = tar::EntryType::Link;
    vec![
        Tar::new()
            .folder("etc")
            .file("etc/hosts", b"first")
            .file("etc/gone", &[1; 9000])
            .file("var/cache/a", &[2; 20_000])
            .file("bin/tool", &[3; 70_000])
            .link(tar::EntryType::Symlink, "lib", "usr/lib")
            .bytes(),
        Tar::new()
            .file("etc/hosts", b"second")
            .file("etc/.wh.gone", b"")
            .file("var/cache/.wh..wh..opq", b"")
            .file("var/cache/b", b"new")
            .link(hard, "bin/same", "bin/tool")
            .bytes(),
        Tar::new()
            .file("bin/tool", b"replaced")
            .file("lib/own", b"a folder now")
            .device("dev/null", 1, 3)
            .bytes(),
    ]
}

#[test]
fn layers_are_flattened() {
    for how in [
        Compression::Plain,
        Compression::Gzip,
        Compression::Zstd,
        Compression::Xz,
    ] {
        let (imported, folder) = fetched(&three_layers(), how).unwrap();
        assert_eq!(imported.config.cmd, ["sh"]);
        let unpacked = extract(&folder.path().join("image"));
        let read = |name: &str| fs::read(unpacked.root.join(name)).unwrap();
        assert_eq!(read("etc/hosts"), b"second");
        assert!(!unpacked.root.join("etc/gone").exists());
        assert!(!unpacked.root.join("var/cache/a").exists());
        assert_eq!(read("var/cache/b"), b"new");
        assert_eq!(read("bin/same"), [3; 70_000], "a link keeps its target");
        assert_eq!(read("bin/tool"), b"replaced");
        assert!(
            fs::symlink_metadata(unpacked.root.join("lib"))
                .unwrap()
                .is_dir()
        );
    }
}

#[test]
fn hidden_files_take_no_space_in_the_image() {
    let layers = |filler: u8| {
        vec![
            Tar::new()
                .file("big", &vec![filler; 4 << 20])
                .file("small", b"s")
                .bytes(),
            Tar::new().file("big", b"").bytes(),
        ]
    };
    let (imported, _) = fetched(&layers(1), Compression::Gzip).unwrap();
    assert!(imported.size < 64 * 1024, "{} bytes", imported.size);
    let (other, _) = fetched(&layers(2), Compression::Gzip).unwrap();
    assert_eq!(
        imported.digest, other.digest,
        "nothing hidden is in the image"
    );
}

#[test]
fn one_tree_gives_one_image_from_every_source_format() {
    let scratch = tempfile::tempdir().unwrap();
    let path = |name: &str| scratch.path().join(name);
    let (flat, folder) = fetched(&three_layers(), Compression::Gzip).unwrap();

    // As a folder that fsck.erofs unpacked.
    let unpacked = extract(&folder.path().join("image"));
    let source = open(&unpacked.root).unwrap();
    assert_eq!(source.kind(), SourceKind::Folder);
    assert_eq!(imported(&unpacked.root).unwrap().digest, flat.digest);

    // As a layout, as a tar of it, and compressed.
    Layout::new(&path("layout")).image(&three_layers(), Compression::Zstd, "amd64", "v1");
    assert_eq!(imported(&path("layout")).unwrap().digest, flat.digest);
    let mut builder = tar::Builder::new(Vec::new());
    builder.append_dir_all(".", path("layout")).unwrap();
    let bytes = builder.into_inner().unwrap();
    for how in [
        Compression::Plain,
        Compression::Gzip,
        Compression::Zstd,
        Compression::Xz,
    ] {
        fs::write(path("archive"), compress(&bytes, how)).unwrap();
        assert_eq!(open(&path("archive")).unwrap().kind(), SourceKind::Oci);
        let found = imported(&path("archive")).unwrap();
        assert_eq!(found.digest, flat.digest, "{how:?}");
        assert_eq!(found.config.stop_signal.as_deref(), Some("SIGINT"));
    }

    // As a `docker save` archive.
    let config = json!({"architecture": "amd64", "os": "linux", "config": {"User": "me"},
        "rootfs": {"diff_ids": three_layers().iter().map(|tar| digest(tar)).collect::<Vec<_>>()}});
    let config = config.to_string();
    let name = digest(config.as_bytes()).replace("sha256:", "") + ".json";
    let layer_names: Vec<String> = three_layers()
        .iter()
        .map(|tar| digest(tar).replace("sha256:", "") + "/layer.tar")
        .collect();
    let manifest = json!([{"Config": name, "RepoTags": ["x:latest"], "Layers": layer_names}]);
    let mut save = Tar::new();
    for (name, tar) in layer_names.iter().zip(three_layers()) {
        save = save.file(name, &tar);
    }
    let save = save
        .file(&name, config.as_bytes())
        .file("manifest.json", manifest.to_string().as_bytes())
        .bytes();
    let source = Source::stream(save.as_slice(), &Choice::new(scratch.path())).unwrap();
    assert_eq!(source.kind(), SourceKind::DockerArchive);
    assert_eq!(source.config().user, "me");
    let out = tempfile::tempdir().unwrap();
    assert_eq!(
        run(source, &out.path().join("i")).unwrap().digest,
        flat.digest
    );
}

/// A format that is given is neither guessed nor ignored.
#[test]
fn an_archive_is_read_as_the_format_that_is_given() {
    let scratch = tempfile::tempdir().unwrap();
    let read = |tar: &[u8], format| {
        let choice = Choice {
            format: Some(format),
            ..Choice::new(scratch.path())
        };
        Source::stream(tar, &choice).map(|source| source.kind())
    };
    // A root file system whose only file is called like the list of a Docker archive.
    let root = Tar::new().file("manifest.json", b"{}").bytes();
    Source::stream(root.as_slice(), &Choice::new(scratch.path())).unwrap_err();
    assert_eq!(
        read(&root, SourceKind::RootTar).unwrap(),
        SourceKind::RootTar
    );
    let error = read(&root, SourceKind::Oci).unwrap_err().to_string();
    assert_eq!(error, "it is not an OCI image layout");

    // A Docker archive with a file more than those that it refers to.
    let layer = Tar::new().file("a", b"a").bytes();
    let config =
        json!({"architecture": "amd64", "os": "linux", "rootfs": {"diff_ids": [digest(&layer)]}});
    let manifest = json!([{"Config": "config.json", "Layers": ["layer.tar"]}]);
    let docker = Tar::new()
        .file("README", b"how to load it")
        .file("config.json", config.to_string().as_bytes())
        .file("layer.tar", &layer)
        .file("manifest.json", manifest.to_string().as_bytes())
        .bytes();
    let read_docker = read(&docker, SourceKind::DockerArchive);
    assert_eq!(read_docker.unwrap(), SourceKind::DockerArchive);
    let plain = Tar::new().file("README", b"no image").bytes();
    let error = read(&plain, SourceKind::DockerArchive).unwrap_err();
    assert_eq!(error.to_string(), "it is not a `docker save` archive");
}

#[test]
fn the_order_of_entries_and_padding_do_not_matter() {
    let one = Tar::new()
        .folder("d")
        .file("d/a", b"a")
        .file("d/b", &[5; 8000])
        .bytes();
    let mut two = Tar::new()
        .folder("d")
        .file("d/b", &[5; 8000])
        .file("d/a", b"a")
        .bytes();
    two.extend([0; 10_240]);
    let first = fetched(&[one], Compression::Gzip).unwrap().0;
    let second = fetched(&[two], Compression::Plain).unwrap().0;
    assert_eq!(first.digest, second.digest);
}

#[test]
fn the_platform_is_chosen_from_an_index() {
    let scratch = tempfile::tempdir().unwrap();
    let arm = vec![Tar::new().file("arm", b"").bytes()];
    let amd = vec![Tar::new().file("amd", b"").bytes()];
    Layout::new(scratch.path())
        .image(&arm, Compression::Gzip, "arm64", "")
        .image(&amd, Compression::Gzip, "amd64", "");
    let alone = fetched(&amd, Compression::Gzip).unwrap().0.digest;
    assert_eq!(imported(scratch.path()).unwrap().digest, alone);
    let choice = Choice {
        platform: Platform {
            architecture: "riscv64".into(),
            ..Platform::default()
        },
        ..Choice::new(scratch.path())
    };
    let error = Source::open(scratch.path(), &choice)
        .unwrap_err()
        .to_string();
    assert_eq!(
        error,
        "it contains no image for linux/riscv64; it contains: linux/arm64, linux/amd64"
    );

    let wrong = tempfile::tempdir().unwrap();
    let config = json!({"architecture": "arm64", "os": "linux"});
    Layout::new(wrong.path()).image_with(&config, &amd, Compression::Gzip, "amd64", "");
    let error = open(wrong.path()).unwrap_err();
    assert!(error.contains("the image is for linux/arm64"), "{error}");
}

#[test]
fn one_of_several_images_is_chosen_by_name() {
    let scratch = tempfile::tempdir().unwrap();
    let tars = |name: &str| vec![Tar::new().file(name, b"").bytes()];
    Layout::new(scratch.path())
        .image(&tars("1"), Compression::Gzip, "amd64", "one")
        .image(&tars("2"), Compression::Gzip, "amd64", "two");
    let error = open(scratch.path()).unwrap_err();
    assert!(error.ends_with("choose one of them: one, two"), "{error}");
    let mut choice = Choice::new(scratch.path());
    choice.reference = Some("two".into());
    let out = tempfile::tempdir().unwrap();
    let found = run(
        Source::open(scratch.path(), &choice).unwrap(),
        &out.path().join("i"),
    );
    let alone = fetched(&tars("2"), Compression::Gzip).unwrap().0.digest;
    assert_eq!(found.unwrap().digest, alone);
    choice.reference = Some("three".into());
    let error = Source::open(scratch.path(), &choice)
        .unwrap_err()
        .to_string();
    assert_eq!(
        error,
        "it contains no image \"three\"; it contains: one, two"
    );
}

#[test]
fn hostile_layers_are_refused_with_a_message() {
    let symlink = tar::EntryType::Symlink;
    let hard = tar::EntryType::Link;
    let refused = |tar: Tar, what: &str| {
        let error = refusal(&[Tar::new().file("lower", b"").bytes(), tar.bytes()]);
        assert!(error.starts_with("layer 2 of 2 (sha256:"), "{error}");
        assert!(error.contains(what), "{error}");
    };
    refused(
        Tar::new().raw_path(b"../../etc/passwd"),
        "it leaves the root folder",
    );
    refused(
        Tar::new().raw_path(b"a/../../b"),
        "it leaves the root folder",
    );
    let through = |target: &str| {
        Tar::new()
            .link(symlink, "d", target)
            .file("d/passwd", b"root")
    };
    refused(through("/etc"), "\"d\" in its path is not a folder");
    refused(through("../../etc"), "\"d\" in its path is not a folder");
    refused(through("d"), "\"d\" in its path is not a folder");
    refused(
        Tar::new().link(hard, "a", "../../etc/shadow"),
        "links to \"../../etc/shadow\"",
    );
    refused(
        Tar::new().link(hard, "a", "/etc/shadow"),
        "which is not an earlier file",
    );
    refused(
        Tar::new().link(hard, "a", "a"),
        "which is not an earlier file",
    );
    refused(
        Tar::new().file("a", b"1").file("./a", b"2"),
        "that name twice",
    );
    refused(
        Tar::new().file("a", b"1").link(symlink, "a", "x"),
        "that name twice",
    );
    refused(
        Tar::new().file("d/.wh...", b""),
        "a whiteout without a name",
    );
    refused(Tar::new().file(".wh.", b""), "a whiteout without a name");
    // Absolute paths are relative to the image's root.
    let absolute = Tar::new().raw_path(b"/etc/passwd").bytes();
    let relative = Tar::new().raw_path(b"etc/passwd").bytes();
    assert_eq!(
        fetched(&[absolute], Compression::Gzip).unwrap().0.digest,
        fetched(&[relative], Compression::Gzip).unwrap().0.digest
    );
    // A loop of links is imported as links.
    let circles = Tar::new()
        .link(symlink, "a", "b")
        .link(symlink, "b", "a")
        .bytes();
    fetched(&[circles], Compression::Gzip).unwrap();
}

#[test]
fn damaged_and_changed_blobs_are_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let tar = Tar::new().file("f", &[7; 100_000]).bytes();
    let path = scratch.path().join("blob");
    let right = compress(&tar, Compression::Gzip);
    let refused = |blob: &[u8], layer: &dyn Fn(Layer) -> Layer| {
        fs::write(&path, blob).unwrap();
        let layer = layer(Layer {
            path: path.clone(),
            digest: Some(Digest::of(&right)),
            diff_id: Some(Digest::of(&tar)),
            size: Some(right.len() as u64),
            ..Layer::default()
        });
        let out = tempfile::tempdir().unwrap();
        let source = Source::layers(b"{}", &[layer], &Choice::new(out.path()));
        match source {
            Ok(source) => run(source, &out.path().join("i")).unwrap_err(),
            Err(error) => sentence(&error),
        }
    };
    let same = |layer: Layer| layer;
    let mut flipped = right.clone();
    flipped[right.len() / 2] ^= 0x10;
    let error = refused(&flipped, &same);
    assert!(error.contains("its digest is sha256:"), "{error}");
    let error = refused(&right[..right.len() - 1], &same);
    assert!(error.contains("bytes, expected"), "{error}");
    let other = compress(&Tar::new().file("g", b"").bytes(), Compression::Gzip);
    let error = refused(&other, &|layer| Layer {
        digest: None,
        size: None,
        ..layer
    });
    assert!(error.contains("its digest after unpacking is"), "{error}");
    let cut = |layer: Layer| Layer {
        digest: None,
        diff_id: None,
        size: None,
        ..layer
    };
    let error = refused(&right[..right.len() - 20], &cut);
    assert!(error.contains("can't be unpacked"), "{error}");
    let error = refused(b"BZh91AY&SY", &cut);
    assert!(error.contains("bzip2, which is not supported"), "{error}");
    let error = refused(&right, &|layer| Layer {
        media_type: "application/vnd.oci.image.layer.v1.tar+gzip+encrypted".into(),
        ..layer
    });
    assert!(error.contains("can't be imported"), "{error}");
}

#[test]
fn decompression_bombs_are_refused() {
    let scratch = tempfile::tempdir().unwrap();
    let tar = Tar::new().file("zeros", &vec![0; 8 << 20]).bytes();
    let import_with = |limits: Limits, how| {
        let path = scratch.path().join("blob");
        fs::write(&path, compress(&tar, how)).unwrap();
        let layer = Layer {
            path,
            ..Layer::default()
        };
        let out = tempfile::tempdir().unwrap();
        let source = Source::layers(b"{}", &[layer], &Choice::new(out.path())).unwrap();
        let run = import(source, &out.path().join("i"), &limits, &mut |_| {
            ControlFlow::Continue(())
        });
        assert_eq!(
            fs::read_dir(out.path()).unwrap().count(),
            usize::from(run.is_ok())
        );
        run.map_err(|error| sentence(&error))
    };
    let small = Limits {
        unpacked_bytes: 3 << 20,
        ..Limits::default()
    };
    for how in [
        Compression::Gzip,
        Compression::Zstd,
        Compression::Xz,
        Compression::Plain,
    ] {
        let error = import_with(small, how).unwrap_err();
        assert!(
            error.contains("unpacks to more than the limit of 3145728 bytes"),
            "{error}"
        );
        import_with(Limits::default(), how).unwrap();
    }
    let few = Limits {
        entries: 1,
        ..Limits::default()
    };
    import_with(few, Compression::Gzip).unwrap();
    let layers = [Tar::new().file("a", b"").file("b", b"").bytes()];
    let path = scratch.path().join("two");
    fs::write(&path, &layers[0]).unwrap();
    let error = import(
        open(&path).unwrap(),
        &scratch.path().join("i"),
        &few,
        &mut |_| ControlFlow::Continue(()),
    )
    .unwrap_err();
    assert!(matches!(error, ImportError::TooManyEntries(1)), "{error}");
}

#[test]
fn a_progress_callback_sees_the_import_and_may_cancel_it() {
    let scratch = tempfile::tempdir().unwrap();
    let tar = Tar::new().file("f", &vec![9; 3 << 20]).bytes();
    fs::write(
        scratch.path().join("tar"),
        compress(&tar, Compression::Gzip),
    )
    .unwrap();
    let out = tempfile::tempdir().unwrap();
    let file = out.path().join("i");
    let source = || open(&scratch.path().join("tar")).unwrap();
    let mut told = Vec::new();
    import(source(), &file, &Limits::default(), &mut |progress| {
        told.push(progress);
        ControlFlow::Continue(())
    })
    .unwrap();
    let wrote = |progress: &&Progress| matches!(progress, Progress::Writing { .. });
    assert!(told.iter().any(|progress| wrote(&progress)));
    let Some(Progress::Writing { done, total }) = told.last() else {
        panic!("{told:?}");
    };
    assert_eq!(done, total);
    fs::remove_file(&file).unwrap();
    for end_at in 0..told.len() {
        let mut count = 0;
        let error = import(source(), &file, &Limits::default(), &mut |_| {
            count += 1;
            if count > end_at {
                ControlFlow::Break(())
            } else {
                ControlFlow::Continue(())
            }
        })
        .unwrap_err();
        assert!(matches!(error, ImportError::Cancelled), "{error}");
        assert_eq!(fs::read_dir(out.path()).unwrap().count(), 0);
    }
}
