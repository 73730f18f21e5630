"""Reads conversations with images: looks at the headers, writes the images' tokens out, counts what
is left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from shardwright.data import conversations
from shardwright.data.chat_format import Span
from shardwright.data.image_files import (
    DamagedImage,
    ImageSource,
    ImageWriter,
    extract_images,
    inspect_image,
)
from shardwright.data.image_inputs import ImageProcessor
from shardwright.data.indexed_dataset import DocumentWriter
from shardwright.data.reading_progress import ReadingProgress
from shardwright.data.record_counts import RecordCounts
from shardwright.data.source_records import records
from shardwright.data.tokenizers import Tokenizer
from shardwright.diagnostics import Refusal, refusal
from shardwright.recipe.recipe_types import DataSection


class ImageConversationReader:
    """Reads one source. writer, pictures: of the same folder. Errors: SW6130 to SW6134, and those
    of conversations."""

    def __init__(
        self,
        part: DataSection,
        tokenizer: Tokenizer,
        image_processor: ImageProcessor,
        writer: DocumentWriter,
        pictures: ImageWriter,
        report: RecordCounts,
    ) -> None:
        assert part.images is not None
        self.part, self.images, self.tokenizer, self.image_processor = (
            part,
            part.images,
            tokenizer,
            image_processor,
        )
        self.writer, self.pictures, self.report = writer, pictures, report
        self._template = conversations.resolve_chat_template(tokenizer, part.template)
        self._records = 0

    def read(self, files: tuple[str, ...], shown: ReadingProgress) -> Iterator[None]:
        """Yields after each record."""
        for name in files:
            for record in records(name, self.report):
                self._records += 1
                shown.add(record[2])
                try:
                    talk = conversations.conversation(record, self.part.messages)
                    self._take(talk, record[0].get("images"), self._folder(name))
                except Refusal as problem:
                    self.report.skip_record(problem)
                yield
        self._check_damage()

    def _folder(self, name: str) -> Path:
        return Path(self.images.folder or Path(name).parent)

    def _take(self, talk: conversations.Conversation, images: object, folder: Path) -> None:
        messages, sources = extract_images(images, talk.messages, talk.where)
        if len(sources) > self.images.per_row:
            self.pictures.counts.too_many_images += 1
            return
        try:
            found = [inspect_image(source, folder) for source in sources]
        except DamagedImage as why:
            self.pictures.damaged(f"{talk.where}: {why}")
            if not self.part.skip_damaged:
                self._check_damage()
            return

        def expand(text: str, spans: list[Span]) -> tuple[str, list[Span]]:
            return self._expand_placeholders(talk.where, text, spans, found)

        talk = replace(talk, messages=messages)
        ids, trained = conversations.encode(
            talk, self.tokenizer, self._template, self.part.train_on, expand, self.report
        )
        number = self.writer.documents
        self.writer.add(ids, trained)
        if self.writer.documents > number:
            self.pictures.add(number, found)

    def _expand_placeholders(
        self, where: str, text: str, spans: list[Span], found: list[ImageSource]
    ) -> tuple[str, list[Span]]:
        if self.image_processor.has_adjacent_images(text):
            raise refusal(
                "SW6136",
                f"{where}: two pictures follow each other without a token between them, and this "
                "type tells pictures apart by what stands between them",
                (
                    "Let data.template write what the type puts around a picture, as its own "
                    "template does."
                ),
            )
        written = self.image_processor.expand(text, spans, found)
        if written is None:
            raise refusal(
                "SW6131",
                f"{where}: the chat template writes {self.image_processor.token!r} "
                f"{text.count(self.image_processor.token)} times for {len(found)} pictures",
                "For each part of the type `image` a template writes "
                f"{self.image_processor.token!r} once, "
                "and no text holds it. Correct data.template, or the record.",
            )
        return written

    def _check_damage(self) -> None:
        counts = self.pictures.counts
        if counts.damaged <= self.part.skip_damaged * self._records:
            return
        raise refusal(
            "SW6134",
            (
                f"{counts.damaged} of {self._records} conversations have a damaged picture: "
                f"{'; '.join(counts.told)}"
            ),
            "Mend or delete them, or let some go: `skip_damaged: 0.01` leaves out up to that share "
            "of the conversations, and `prepare` counts them.",
        )
