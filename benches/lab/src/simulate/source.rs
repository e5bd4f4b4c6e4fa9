//! Source of accesses: a file or a generator, read in blocks, from the start for each simulation.

use std::fs::File;
use std::path::{Path, PathBuf};

use wideleaf_memory::input_file::InputFile;
use wideleaf_policies::Bytes;
use wideleaf_simulator::streams;
use wideleaf_trace::{Access, TraceReader};

use super::generated::{self, Accesses, Generated};
use wideleaf_run::failure::Failure;

/// Accesses of a generated block: a few pages of memory, so that the bar moves and Ctrl-C is checked.
const BLOCK: usize = 16 * 1024;

/// Source that `--trace` named.
pub enum Source {
    /// A file of `wideleaf-lab trace record`.
    Recorded(PathBuf),
    /// A generated stream.
    Generated(Generated),
}

/// Facts known before the first access.
pub struct SourceInfo {
    /// Kernel, or kind of stream.
    pub kernel: String,
    /// Class of the kernel; empty if it has no classes.
    pub class: String,
    /// Parameters of the kernel or stream.
    pub parameters: String,
    /// Memory that it accesses.
    pub arena: Bytes,
    /// Number of recorded iterations, and of those of the class; 0 if there are none.
    pub iterations: (u32, u32),
}

/// A source during its reading.
pub struct Blocks {
    /// Facts about the source.
    pub info: SourceInfo,
    from: BlockSource,
}

enum BlockSource {
    File { path: PathBuf, bytes: u64, reader: Box<TraceReader<File>> },
    Generator { accesses: Accesses, length: u64, done: u64 },
}

impl Source {
    /// A stream if one has that name, otherwise a file.
    ///
    /// # Errors
    /// [`Failure::Usage`] if it is neither, or its parameters are invalid.
    pub fn parse(text: &str) -> Result<Source, Failure> {
        match Generated::parse(text) {
            Some(stream) => {
                stream.map(Source::Generated).map_err(|why| Failure::Usage(format!("cannot use --trace {text}: {why}")))
            }
            None if text.contains(':') && !Path::new(text).exists() => {
                let names = generated::names();
                Err(Failure::Usage(format!(
                    "cannot use --trace {text}: there is no such file and no such stream; the streams are {names}"
                )))
            }
            None => Ok(Source::Recorded(text.into())),
        }
    }

    /// Begins at the first access.
    ///
    /// # Errors
    /// [`Failure::Input`] if the file is not a trace or cannot be read.
    pub fn open(&self) -> Result<Blocks, Failure> {
        match self {
            Source::Recorded(path) => open_file(path),
            Source::Generated(stream) => Ok(Blocks {
                info: SourceInfo {
                    kernel: stream.name().to_owned(),
                    class: String::new(),
                    parameters: stream.to_string(),
                    arena: stream.arena(),
                    iterations: (0, 0),
                },
                from: BlockSource::Generator { accesses: stream.accesses(), length: stream.length(), done: 0 },
            }),
        }
    }
}

fn open_file(path: &Path) -> Result<Blocks, Failure> {
    let unusable =
        |why: &dyn std::fmt::Display| Failure::Input(format!("cannot use --trace {}: {why}", path.display()));
    // Each simulation reads it anew: the second would find a pipe empty.
    let file = InputFile::open(path).map_err(|error| unusable(&error))?;
    let bytes = file.bytes().get();
    let reader = Box::new(TraceReader::open(file.into_file()).map_err(|error| unusable(&error))?);
    let header = reader.header().clone();
    Ok(Blocks {
        info: SourceInfo {
            kernel: header.kernel,
            class: header.class,
            parameters: header.parameters,
            arena: Bytes::new(header.arena_bytes),
            iterations: (header.iterations, header.class_iterations),
        },
        from: BlockSource::File { path: path.to_owned(), bytes, reader },
    })
}

impl Blocks {
    /// Replaces the contents of `block` by the next accesses. Returns `false` at the end.
    ///
    /// # Errors
    /// [`Failure::Input`] if the file is cut off or damaged.
    pub fn next(&mut self, block: &mut Vec<Access>) -> Result<bool, Failure> {
        match &mut self.from {
            BlockSource::File { path, reader, .. } => {
                let unusable = |why| Failure::Input(format!("cannot use --trace {}: {why}", path.display()));
                reader.next_block(block).map_err(unusable)
            }
            BlockSource::Generator { accesses, done, .. } => {
                block.clear();
                let access = |streams::Access { address, is_write, repeats }| Access { address, is_write, repeats };
                block.extend(accesses.take(BLOCK).map(access));
                *done += block.iter().map(|access| u64::from(access.repeats)).sum::<u64>();
                Ok(!block.is_empty())
            }
        }
    }

    /// Share of it that has been read.
    pub fn share_done(&self) -> f64 {
        let (done, all) = match &self.from {
            BlockSource::File { bytes, reader, .. } => (reader.bytes(), *bytes),
            BlockSource::Generator { length, done, .. } => (*done, *length),
        };
        done as f64 / all.max(1) as f64
    }

    /// Whether its recording ended before the kernel did; known at the end.
    pub fn is_cut(&self) -> bool {
        matches!(&self.from, BlockSource::File { reader, .. } if reader.totals().is_cut)
    }
}
