"""Which path is which page."""

from __future__ import annotations

from pathlib import Path

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from libs.serving.telemetry import Telemetry
from services.console.clients import Clients, OpenInstance
from services.console.config import ConsoleConfig
from services.console.guard import Guard
from services.console.live import Watches
from services.console.measures import Timed, measure_viewers, measures_of
from services.console.pages import (
    dead_letters,
    events,
    janitor,
    login,
    messages,
    overview,
    processes,
    queue_forms,
    queues,
)
from services.console.payloads import Payloads
from services.console.rendering import Console, Problem, render, show_error
from services.console.sessions import SessionSeal
from slatemq.errors import SlateMQError


def routes() -> list[Route | Mount]:
    """GET shows, and changes nothing; what changes something is a POST."""
    return [
        Route("/", overview.show_overview),
        Route("/live/overview", overview.stream_overview),
        Route("/live/queue", queues.stream_queue),
        Route("/queue", queues.show_queue),
        Route("/queue/filter", queues.test_filter, methods=["POST"]),
        Route("/queue/new", queue_forms.show_new),
        Route("/queue/new", queue_forms.create, methods=["POST"]),
        Route("/queue/settings", queue_forms.show_settings),
        Route("/queue/settings", queue_forms.change, methods=["POST"]),
        Route("/queue/try", queue_forms.try_draft, methods=["POST"]),
        Route("/queue/do/{action}", queues.confirm_action),
        Route("/queue/do/{action}", queues.run_action, methods=["POST"]),
        Route("/messages", messages.list_messages),
        Route("/message", messages.show_message),
        Route("/message/payload", messages.download_payload),
        Route("/message/cancel", messages.cancel_message, methods=["POST"]),
        Route("/message/deliver", messages.deliver_now, methods=["POST"]),
        Route("/dead-letters", dead_letters.list_dead_letters),
        Route("/dead-letters/settle", dead_letters.settle, methods=["POST"]),
        Route("/dead-letters/redrive", dead_letters.start_redrive, methods=["POST"]),
        Route("/dead-letter", dead_letters.show_editor),
        Route("/dead-letter", dead_letters.replace, methods=["POST"]),
        Route("/redrives", dead_letters.show_redrives),
        Route("/redrives", dead_letters.steer_redrive, methods=["POST"]),
        Route("/processes", processes.show_processes),
        Route("/janitor", janitor.list_runs),
        Route("/janitor", janitor.run_job, methods=["POST"]),
        Route("/run", janitor.show_run),
        Route("/run/cancel", janitor.cancel_run, methods=["POST"]),
        Route("/report", janitor.show_report),
        Route("/events", events.show_events),
        Route("/events/retry", events.retry_tasks, methods=["POST"]),
        Route("/login", login.show_login),
        Route("/login", login.log_in, methods=["POST"]),
        Route("/logout", login.log_out, methods=["POST"]),
        Route("/health", show_health),
        Mount("/static", StaticFiles(directory=Path(__file__).with_name("static"))),
    ]


def build_app(config: ConsoleConfig, telemetry: Telemetry) -> Starlette:
    """The application; its state has the `console`."""
    clients = Clients(config)
    seal = SessionSeal(config.session_s)
    measures = measures_of(telemetry, config)
    watches = Watches(clients, measures.samples)
    measure_viewers(telemetry, lambda: watches.viewers_count, lambda: watches.streams_count)
    guard = Middleware(Guard, seal=seal, hosts=config.allowed_hosts, needs_login=config.needs_login)
    timed = Middleware(Timed, tracer=telemetry.tracer, durations=measures.requests)
    app = Starlette(
        routes=routes(),
        middleware=[timed, guard] if telemetry.enabled else [guard],
        exception_handlers={
            SlateMQError: show_error,
            OpenInstance: show_error,
            404: show_not_found,
            405: show_not_found,
        },
    )
    app.state.console = Console(config, seal, clients, watches, Payloads(), measures)
    return app


async def show_health(_: Request) -> Response:
    """Whether the process serves, for probes of its pages; the instance's health is in them."""
    return PlainTextResponse("ok")


async def show_not_found(request: Request, _: Exception) -> Response:
    problem = Problem(404, "There is no such page", "The menu above has all pages.")
    return render(request, "error.html", 404, problem=problem, message="")
