//! Writes a report in the requested forms. Places are tried before anything runs, so that a typo does not cost an
//! hour of runs.

use std::path::{Component, Path, PathBuf, absolute};

use clap::{Args, ValueEnum};
use wideleaf::output::{print, say};
use wideleaf_experiments::report::{Report, html, markdown, svg, text};
use wideleaf_run::failure::Failure;
use wideleaf_run::output_file::OutputFile;
use wideleaf_run::same_file::refuse_one_file_for_two;

/// Output forms of a report.
#[derive(Args, Clone, Debug, Default)]
pub struct RenderArgs {
    /// Format of the text [default: table; none if only --html or --svg is given]
    #[arg(long, value_enum)]
    pub format: Option<ReportFormat>,

    /// Write the text to this file instead of standard output
    #[arg(long, value_name = "FILE")]
    pub output: Option<PathBuf>,

    /// Also write the report to this file, as one HTML page with its pictures
    #[arg(long, value_name = "FILE")]
    pub html: Option<PathBuf>,

    /// Write the pictures into this folder, one SVG file each; it is created if necessary
    #[arg(long, value_name = "FOLDER")]
    pub svg: Option<PathBuf>,
}

/// Format of a report's text.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum ReportFormat {
    /// Table for a terminal
    #[default]
    Table,
    /// Markdown for papers and issues; pictures are links to the files of --svg
    Markdown,
}

/// Open places for a report.
pub(super) struct Rendering {
    text: Option<(ReportFormat, Option<OutputFile>)>,
    html: Option<OutputFile>,
    svg: Option<PathBuf>,
    /// Folder of the pictures, relative to the text.
    pictures: Option<String>,
}

impl Rendering {
    /// Opens all of them, or returns the reason why one cannot be opened. None may replace one of the `results`.
    pub(super) fn open(args: &RenderArgs, results: &[&Path]) -> Result<Rendering, Failure> {
        if let Some(folder) = &args.svg {
            try_folder(folder)?;
        }
        let places = [("--output", &args.output), ("--html", &args.html), ("--svg", &args.svg)];
        refuse_one_file_for_two(
            results.iter().map(|path| ("the results", *path)),
            places.map(|(option, path)| (option, path.as_deref())),
        )?;
        let open =
            |option, path: &Option<PathBuf>| path.as_deref().map(|path| OutputFile::open(option, path)).transpose();
        let output = open("--output", &args.output)?;
        let is_text_wanted = args.format.is_some() || output.is_some() || (args.html.is_none() && args.svg.is_none());
        Ok(Rendering {
            text: is_text_wanted.then(|| (args.format.unwrap_or_default(), output)),
            html: open("--html", &args.html)?,
            svg: args.svg.clone(),
            pictures: args.svg.as_deref().map(|folder| as_found_from(args.output.as_deref(), folder)),
        })
    }

    /// Writes the report to all places.
    pub(super) fn put(self, report: &Report) -> Result<(), Failure> {
        if let Some(folder) = &self.svg {
            put_pictures(folder, report)?;
        }
        if let Some(place) = self.html {
            place.put(html::html(report).as_bytes())?;
        }
        let Some((format, place)) = self.text else { return Ok(()) };
        let text = match format {
            ReportFormat::Table => text::text(report),
            ReportFormat::Markdown => markdown::markdown(report, self.pictures.as_deref()),
        };
        match place {
            Some(place) => place.put(text.as_bytes()),
            None => print(&text),
        }
    }
}

/// Checks that the folder exists or can be created. Nothing is created yet.
fn try_folder(folder: &Path) -> Result<(), Failure> {
    let cannot = |why: &str| Failure::Output(format!("cannot write --svg {}: {why}", folder.display()));
    let parent = folder.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    match (folder.is_dir(), folder.exists(), parent.is_dir()) {
        (true, ..) => Ok(()),
        (false, true, _) => Err(cannot("it is not a folder")),
        (false, false, true) => Ok(()),
        (false, false, false) => Err(cannot(&format!("there is no folder {}", parent.display()))),
    }
}

fn put_pictures(folder: &Path, report: &Report) -> Result<(), Failure> {
    if !folder.is_dir() {
        std::fs::create_dir(folder)
            .map_err(|error| Failure::Output(format!("cannot write --svg {}: {error}", folder.display())))?;
    }
    let pictures = report.pictures();
    for (name, plot) in &pictures {
        OutputFile::open("--svg", &folder.join(name))?.put(svg::svg(plot).as_bytes())?;
    }
    if pictures.is_empty() {
        say("nothing written to --svg: this report has no pictures");
    }
    Ok(())
}

/// Path of a folder for links in a file; without a file, for links from the present folder.
fn as_found_from(file: Option<&Path>, folder: &Path) -> String {
    let path = file.and_then(Path::parent).and_then(|parent| relative(parent, folder));
    path.as_deref().unwrap_or(folder).display().to_string()
}

/// Path of `to` as seen from the folder `from`, or its absolute path where `from` leads up by `..`; `None` where the
/// present folder is unknown.
fn relative(from: &Path, to: &Path) -> Option<PathBuf> {
    // An empty path, the parent of a plain name, is no absolute one.
    let (from, to) = (absolute(Path::new(".").join(from)).ok()?, absolute(to).ok()?);
    let shared = from.components().zip(to.components()).take_while(|(from, to)| from == to).count();
    let mut down = from.components().skip(shared);
    if down.clone().any(|part| part == Component::ParentDir) {
        return Some(to);
    }
    let up = std::iter::from_fn(|| down.next().map(|_| Component::ParentDir));
    let path: PathBuf = up.chain(to.components().skip(shared)).collect();
    Some(if path.as_os_str().is_empty() { ".".into() } else { path })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_lead_from_the_text_to_the_pictures() {
        let found = |file: Option<&str>, folder: &str| as_found_from(file.map(Path::new), Path::new(folder));
        assert_eq!(found(Some("paper/report.md"), "paper/pictures"), "pictures");
        assert_eq!(found(Some("report.md"), "pictures"), "pictures");
        assert_eq!(found(None, "paper/pictures"), "paper/pictures");
        assert_eq!(found(Some("paper/report.md"), "paper"), ".", "beside the text");
        assert_eq!(found(Some("text/report.md"), "pictures"), "../pictures");
        assert_eq!(found(Some("/a/b/c/report.md"), "/a/pictures"), "../../pictures");
        assert!(found(Some("../report.md"), "pictures").ends_with("/pictures"), "a link may be anywhere");
    }
}
